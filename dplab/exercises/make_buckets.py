"""Which gradients travel in one message: those that backward computes one after another."""

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def make_buckets(sizes, bucket_bytes, first_bytes=None):
    """Indices from the last to the first, in buckets that close when they reach their limit.

    Backward computes the last layer's gradients first, so the last parameters fill the first
    bucket. ``sizes``: the bytes of each. The first bucket's limit is ``first_bytes``, where that is
    given, so that something is sent early; DDP takes 1 MiB, and 25 MiB for the others.
    """
    buckets, held, limit = [], 0, 0
    for index in reversed(range(len(sizes))):
        if held >= limit:
            limit = bucket_bytes if buckets or first_bytes is None else first_bytes
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += sizes[index]
    return buckets


def closing_each_bucket(sizes, bucket_bytes, first_bytes=None):
    """The same with one open bucket, which is added to the others when it is full."""
    buckets, bucket, held = [], [], 0
    limit = bucket_bytes if first_bytes is None else first_bytes
    for index in reversed(range(len(sizes))):
        bucket.append(index)
        held += sizes[index]
        full = held >= limit
        if full or index == 0:
            buckets.append(bucket)
            bucket = []
            held = 0
            limit = bucket_bytes
    return buckets


# Sizes, the bytes of a bucket, and those of the first. A layer without parameters has 0 bytes.
SIZES = (196, 28, 140, 20, 60, 12)
CASES = ((SIZES, 80, None), (SIZES, 72, None), (SIZES, 1, None), (SIZES, 200, None),
         (SIZES, 456, None), (SIZES, 10**9, None), ((7,), 7, None), ((0, 12, 8), 20, None),
         ((), 20, None), (SIZES, 160, 12), (SIZES, 100, 61), (SIZES, 30, 140))


class MakeBuckets(Calculation):
    number = "5.1"
    title = "Which gradients go together"
    minutes = 7
    solution = staticmethod(make_buckets)
    also_right = (closing_each_bucket,)

    def trial(self, attempt):
        return of_cases(bucket_facts, CASES, lambda sizes, limit, first: attempt(
            list(sizes), limit, *(() if first is None else (first,))))

    def expected(self, world_size):
        return of_cases(bucket_facts, CASES, make_buckets)

    hints = (
        "Go through the indices from the last one to the first. What do you have to remember "
        "from one to the next?",
        "Remember the open bucket and the bytes in it. When does a new bucket begin: before you "
        "put an index in, or after? What is left when the indices are used up?",
        "Start a new, empty list as soon as the one before it holds `bucket_bytes` or more *and* "
        "there is an index to put in. Set the count of bytes back to zero at the same place.",
    )
    slips = (
        Slip("Your first bucket closes at `bucket_bytes`. Where `first_bytes` is given, that is "
             "its limit.", {"bucket_bytes if buckets or first_bytes is None else first_bytes":
                        "bucket_bytes"}),
        Slip("All your buckets close at `first_bytes`. It is the limit of the first one alone.",
             {"buckets or first_bytes": "first_bytes"}),
        Slip("You filled the buckets from the first index on. Backward computes the last layer's "
             "gradients first: go from the last index to the first.",
             {"index == 0": "index == len(sizes) - 1",
              "reversed(range(len(sizes)))": "range(len(sizes))"}),
        Slip("The buckets are right and stand in the wrong order. The one with the last index "
             "comes first: its gradients are ready first.",
             {"return buckets": "return buckets[::-1]"}),
        Slip("Within a bucket the indices ascend. Here they go from the last to the first too.",
             {"return buckets": "return [sorted(bucket) for bucket in buckets]"},
             {"buckets.append(bucket)": "buckets.append(sorted(bucket))"}),
        Slip("What a bucket holds beyond its limit counts for the next one, which closes too "
             "early. Count from 0 in each bucket.",
             {"held = 0": "held %= limit"}),
        Slip("You count indices from the end, as `enumerate(reversed(sizes))` does. An index says "
             "where the size stands in `sizes`.",
             {".append(index)": ".append(len(sizes) - 1 - index)"}),
        Slip("You return sizes. Return their indices in `sizes`.",
             {".append(index)": ".append(sizes[index])"}),
        Slip("The indices go from the last to the first, but beside each you count the bytes of "
             "another gradient: those of `sizes` from its beginning.",
             {"held += sizes[index]": "held += sizes[-1 - index]"}),
        Slip("You count gradients. `bucket_bytes` is a number of bytes: add up their sizes.",
             {"held += sizes[index]": "held += 1"}),
        Slip("Index 0 is in no bucket. `range(a, b, -1)` ends before it comes to b.",
             {"index == 0": "index == 1",
              "reversed(range(len(sizes)))": "range(len(sizes) - 1, 0, -1)"}),
        Slip("You close a bucket before it would exceed (or reach) `bucket_bytes`. Here the "
             "size is a threshold: the gradient that reaches it still belongs to the bucket, "
             "which closes after it.",
             {"if held >= limit:": "if not buckets or held + sizes[index] > limit:"},
             {"if held >= limit:": "if not buckets or held + sizes[index] >= limit:"}),
        Slip("A bucket that holds exactly `bucket_bytes` is full, and you go on filling it: close "
             "it at `>=`, not at `>`.",
             {"full = held >=": "full = held >"}),
        Slip("The last bucket is missing: it is not full when the indices run out. What is left "
             "over is a bucket too.", {" or index == 0": ""}),
        Slip("The last bucket is missing where it holds 0 bytes. A layer without parameters is in "
             "a bucket too: ask whether it has an index, not whether it has bytes.",
             {" or index == 0": "", "return buckets": "return buckets + [bucket] * (held > 0)"}),
        Slip("The last of your buckets is empty where the one before it came out full: begin a "
             "bucket only when there is an index to put in.",
             {" or index == 0": "", "return buckets": "return [*buckets, bucket]"}),
        Slip("Where there is no gradient, there is no bucket, and you return an empty one.",
             {"[], 0, 0": "[[]], 0, bucket_bytes if first_bytes is None else first_bytes",
              "bucket_bytes if buckets or first_bytes is None else first_bytes": "bucket_bytes"}),
        Slip("Your first bucket is empty.",
             {"[], 0, 0": "[[]], 0, 0", "if buckets or": "if buckets != [[]] or"}),
        Slip("From the second bucket on, each index is alone: set the count of bytes back to zero "
             "when a bucket is closed.",
             {"bucket = []\n            held = 0": "bucket = []"}),
        Slip("When a bucket closes, you take `bucket_bytes` off the count. What it held beyond "
             "that then counts for the next bucket, too. Set it back to zero.",
             {"            held = 0": "            held -= limit"}),
        Slip("A bucket keeps its indices after it was closed, so they are in the next one again: "
             "start an empty list.",
             {"bucket = []": "bucket = list(bucket)"},
             {"bucket = []": "bucket = list(bucket)", " or index == 0": "",
              "return buckets": "return [*buckets, bucket]"}),
        Slip("All your buckets are one and the same list, which you empty. Start a new list "
             "(`bucket = []`) where you call `clear()`.",
             {"bucket = []": "bucket.clear()"},
             {"bucket = []": "bucket.clear()", " or index == 0": "",
              "return buckets": "return buckets + [bucket] * bool(bucket)"}),
        Slip("Each index has a bucket of its own. Collect indices until a bucket holds "
             "`bucket_bytes`; where the next one begins, set the count of bytes back to zero.",
             {"held >= limit": "True"}),
    )


def bucket_facts(case, buckets):
    """Lists and tuples, and the like, are the same here."""
    sizes, limit, first = case
    if isinstance(buckets, list | tuple):
        buckets = [list(each) if isinstance(each, tuple | range) else each for each in buckets]
    of_first = "" if first is None else f" ({first} for the first)"
    return {f"the buckets of {limit} bytes{of_first} for the sizes {list(sizes)}": buckets}
