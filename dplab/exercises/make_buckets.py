"""Exercise 5.1: which gradients go together."""

from dplab.checks.exercise import Calculation, Mistake
from dplab.checks.trials import of_cases


def make_buckets(sizes, bucket_bytes):
    """Indices from the last to the first, in buckets that close when they reach ``bucket_bytes``.

    Backward computes the last layer's gradients first, so the last parameters fill the first
    bucket. ``sizes``: the bytes of each.
    """
    buckets, held = [], bucket_bytes
    for index in reversed(range(len(sizes))):
        if held >= bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += sizes[index]
    return buckets


def in_forward_order(sizes, bucket_bytes):
    last = len(sizes) - 1
    buckets = make_buckets(sizes[::-1], bucket_bytes)
    return [[last - index for index in bucket] for bucket in buckets]


def buckets_in_forward_order(sizes, bucket_bytes):
    return make_buckets(sizes, bucket_bytes)[::-1]


def indices_in_forward_order(sizes, bucket_bytes):
    return [sorted(bucket) for bucket in make_buckets(sizes, bucket_bytes)]


def counts_from_the_end(sizes, bucket_bytes):
    last = len(sizes) - 1
    return [[last - index for index in bucket] for bucket in make_buckets(sizes, bucket_bytes)]


def sizes_for_indices(sizes, bucket_bytes):
    return [[sizes[index] for index in bucket] for bucket in make_buckets(sizes, bucket_bytes)]


def closes_before_it_is_exceeded(sizes, bucket_bytes):
    buckets, held = [], 0
    for index in reversed(range(len(sizes))):
        if not buckets or held + sizes[index] > bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += sizes[index]
    return buckets


def goes_on_at_the_size(sizes, bucket_bytes):
    return make_buckets(sizes, bucket_bytes + 1)


def forgets_the_last_bucket(sizes, bucket_bytes):
    buckets, bucket, held = [], [], 0
    for index in reversed(range(len(sizes))):
        bucket.append(index)
        held += sizes[index]
        if held >= bucket_bytes:
            buckets.append(bucket)
            bucket, held = [], 0
    return buckets


def adds_an_empty_bucket(sizes, bucket_bytes):
    buckets, held = [[]], 0
    for index in reversed(range(len(sizes))):
        buckets[-1].append(index)
        held += sizes[index]
        if held >= bucket_bytes:
            buckets.append([])
            held = 0
    return buckets


def begins_with_an_empty_bucket(sizes, bucket_bytes):
    return [[], *make_buckets(sizes, bucket_bytes)]


def goes_on_counting(sizes, bucket_bytes):
    buckets, held = [], bucket_bytes
    for index in reversed(range(len(sizes))):
        if held >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(index)
        held = sum(sizes[index:])
    return buckets


def keeps_the_excess(sizes, bucket_bytes):
    buckets, bucket, held = [], [], 0
    for index in reversed(range(len(sizes))):
        bucket.append(index)
        held += sizes[index]
        if held >= bucket_bytes or index == 0:
            buckets.append(bucket)
            bucket = []
            held -= bucket_bytes
    return buckets


def keeps_its_indices(sizes, bucket_bytes):
    buckets, bucket, held = [], [], 0
    for index in reversed(range(len(sizes))):
        bucket.append(index)
        held += sizes[index]
        if held >= bucket_bytes or index == 0:
            buckets.append(list(bucket))
            held = 0
    return buckets


def one_list_for_all(sizes, bucket_bytes):
    buckets, bucket, held = [], [], 0
    for index in reversed(range(len(sizes))):
        bucket.append(index)
        held += sizes[index]
        if held >= bucket_bytes or index == 0:
            buckets.append(bucket)
            bucket.clear()
            held = 0
    return buckets


def one_by_one(sizes, bucket_bytes):
    return [[index] for index in reversed(range(len(sizes)))]


class MakeBuckets(Calculation):
    number = "5.1"
    title = "Which gradients go together"
    minutes = 5
    hints = (
        "Go through the indices from the last one to the first. What do you have to remember "
        "from one to the next?",
        "Remember the open bucket and the bytes in it. When does a new bucket begin: before you "
        "put an index in, or after? What is left when the indices are used up?",
        "Start a new, empty list as soon as the one before it holds `bucket_bytes` or more *and* "
        "there is an index to put in. Set the count of bytes back to zero at the same place.",
    )
    solution = staticmethod(make_buckets)
    mistakes = (
        Mistake(in_forward_order, "You filled the buckets from the first index on. Backward "
                "computes the last layer's gradients first: go from the last index to the first."),
        Mistake(buckets_in_forward_order, "The buckets are right and stand in the wrong order. "
                "The one with the last index comes first: its gradients are ready first."),
        Mistake(indices_in_forward_order, "Within a bucket the indices ascend. Here they go from "
                "the last to the first too."),
        Mistake(counts_from_the_end, "You count indices from the end, as `enumerate(reversed("
                "sizes))` does. An index says where the size stands in `sizes`."),
        Mistake(sizes_for_indices, "You return sizes. Return their indices in `sizes`."),
        Mistake(closes_before_it_is_exceeded, "You close a bucket before it would exceed "
                "`bucket_bytes`. Here, as in DDP, the size is a threshold: the gradient that "
                "reaches it still belongs to the bucket, which closes after it."),
        Mistake(goes_on_at_the_size, "A bucket that holds exactly `bucket_bytes` is full, and you "
                "go on filling it: close it at `>=`, not at `>`."),
        Mistake(forgets_the_last_bucket, "The last bucket is missing: it is not full when the "
                "indices run out. What is left over is a bucket too."),
        Mistake(adds_an_empty_bucket, "The last of your buckets is empty where the one before it "
                "came out full: begin a bucket only when there is an index to put in."),
        Mistake(begins_with_an_empty_bucket, "Your first bucket is empty."),
        Mistake(goes_on_counting, "From the second bucket on, each index is alone: set the count "
                "of bytes back to zero when a bucket is closed."),
        Mistake(keeps_the_excess, "When a bucket closes, you take `bucket_bytes` off the count. "
                "What it held beyond that then counts for the next bucket, too. Set it back to "
                "zero."),
        Mistake(keeps_its_indices, "A bucket keeps its indices after it was closed, so they are in "
                "the next one again: start an empty list."),
        Mistake(one_list_for_all, "All your buckets are one and the same list, which you empty. "
                "Start a new list (`bucket = []`) where you call `clear()`."),
        Mistake(one_by_one, "Each index has a bucket of its own. Collect indices until a bucket "
                "holds `bucket_bytes`."),
    )
    SIZES = (196, 28, 140, 20, 60, 12)
    CASES = ((SIZES, 80), (SIZES, 72), (SIZES, 1), (SIZES, 200), (SIZES, 456), (SIZES, 10**9),
             ((7,), 7), ((), 20))

    def trial(self, attempt):
        return of_cases(_bucket_facts, [(list(sizes), limit) for sizes, limit in self.CASES],
                        attempt)

    def expected(self, world_size):
        return of_cases(_bucket_facts, [(list(sizes), limit) for sizes, limit in self.CASES],
                        make_buckets)


def _bucket_facts(case, buckets):
    if isinstance(buckets, list | tuple):
        buckets = [list(each) if isinstance(each, tuple | range) else each for each in buckets]
    sizes, limit = case
    return {f"the buckets of {limit} bytes for the sizes {sizes}": buckets}
