"""When each bucket leaves, when it arrives, and what of that comes after backward."""

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases
from dplab.exercises.make_buckets import make_buckets
from dplab.exercises.ring_seconds import ring_seconds
from dplab.predict.step import Layer


def predict_step(layers, bucket_bytes, ranks, bandwidth, latency, first_bytes=None):
    """The seconds of a step whose buckets leave during backward, and how many of them are exposed.

    ``layers`` in the order of forward, each with ``forward_seconds``, ``backward_seconds`` and
    ``gradient_bytes``. Exposed is the communication that is left when backward is over.
    """
    now = sum(layer.forward_seconds for layer in layers)
    ready = [0.0] * len(layers)
    for index in reversed(range(len(layers))):
        now += layers[index].backward_seconds
        ready[index] = now

    free = 0.0  # when the link has sent everything that was launched so far
    gradients = [layer.gradient_bytes for layer in layers]
    for bucket in make_buckets(gradients, bucket_bytes, first_bytes):
        nbytes = sum(layers[index].gradient_bytes for index in bucket)
        start = max(free, ready[bucket[-1]])
        free = start + ring_seconds(nbytes, ranks, bandwidth, latency)
    return free, free - now


def bucket_by_bucket(layers, bucket_bytes, ranks, bandwidth, latency, first_bytes=None):
    """The same from two lists: when each bucket is ready, and how long it takes to send."""
    forward = sum(layer.forward_seconds for layer in layers)
    backward = sum(layer.backward_seconds for layer in layers)
    end = forward + backward
    gradients = [layer.gradient_bytes for layer in layers]
    buckets = make_buckets(gradients, bucket_bytes, first_bytes)
    nbytes = [sum(layers[index].gradient_bytes for index in bucket) for bucket in buckets]
    sending = [ring_seconds(each, ranks, bandwidth, latency) for each in nbytes]
    ready = [end - sum(layer.backward_seconds for layer in layers[: bucket[-1]])
             for bucket in buckets]
    done = 0.0
    for when, seconds in zip(ready, sending, strict=True):
        done = max(done, when) + seconds
    step = done
    exposed = done - end
    return step, exposed


def layers_of(*numbers):
    """From (forward ms, backward ms, MB of gradients)."""
    return [Layer(forward / 1e3, backward / 1e3, megabytes * 1e6)
            for forward, backward, megabytes in numbers]


UNEVEN = layers_of((3, 7, 10), (2, 9, 30), (4, 11, 20), (5, 13, 25), (1, 6, 5))

# By what each is about: layers, bytes of a bucket, ranks, bytes/s and s of the link; and maybe the
# bytes of the first bucket.
CASES = (
    ("a link that is late at the end", UNEVEN, 30e6, 4, 5e9, 1e-4),
    ("a link that falls behind", UNEVEN, 25e6, 3, 1.25e9, 5e-5),
    ("a pause between two buckets", layers_of((1, 150, 1), (2, 190, 80), (3, 10, 3)), 3e6, 2, 1e9,
     1e-3),
    ("latency alone", layers_of(*[(0.2, 1, 0.004)] * 5), 4e3, 64, 5e10, 1.4e-5),
    ("one bucket", UNEVEN, 1e12, 8, 2e9, 1e-4),
    ("layers without parameters", layers_of((2, 3, 8), (1, 2, 0), (5, 9, 40), (1, 4, 0)), 20e6, 5,
     3e9, 2e-4),
    ("one rank", UNEVEN, 30e6, 1, 5e9, 1e-4),
    ("a first bucket of 4e+06 bytes", UNEVEN, 40e6, 4, 2e9, 1e-4, 4e6),
)


class PredictStep(Calculation):
    number = "5.4"
    title = "A scheduler: how long will the step take?"
    minutes = 15
    solution = staticmethod(predict_step)
    also_right = (bucket_by_bucket,)

    def trial(self, attempt):
        return of_cases(step_facts, CASES, lambda name, layers, *rest: attempt(
            list(layers), *rest))

    def expected(self, world_size):
        return self.trial(predict_step)

    def terms(self):
        terms = {"what the step takes": {}, "what is exposed": {}}
        for name, layers, bucket_bytes, ranks, bandwidth, latency, *first in CASES:
            if ranks > 1:  # with one rank nothing is exposed, which is a sum of nothing
                buckets = make_buckets([layer.gradient_bytes for layer in layers], bucket_bytes,
                                       *first)
                sending = [ring_seconds(sum(layers[index].gradient_bytes for index in bucket),
                                        ranks, bandwidth, latency) for bucket in buckets]
                forward = sum(layer.forward_seconds for layer in layers)
                backward = sum(layer.backward_seconds for layer in layers)
                step, _ = predict_step(layers, bucket_bytes, ranks, bandwidth, latency, *first)
                sizes = {"the step": step, "computing": forward + backward, "forward": forward,
                         "backward": backward, "all communication": sum(sending),
                         "the last all-reduce": sending[-1]}
                for common, fact in zip(terms, names_of(name, layers, bucket_bytes, ranks)[1:],
                                        strict=True):
                    terms[common][fact] = sizes
        return terms

    def quantities(self, world_size, rank):
        return {"the milliseconds of a second": 1000}

    hints = (
        "Two clocks: one is when backward has computed up to some layer, the other one is when the "
        "link will be free again. Which of the two decides when a bucket leaves?",
        "First walk through the layers from the last to the first and note when each one's "
        "gradient is ready. Then walk through your buckets: which of its gradients completes one?",
        "A bucket starts at `max(free, ready)` of its last index, and `free` is then the start "
        "plus `ring_seconds` of its bytes. The step ends at `free`; exposed is what lies behind "
        "the end of backward.",
    )
    slips = (
        Slip("You count the last bucket only, or let it leave as soon as it is ready. Where the "
             "link is slow, those before it are still on their way when backward ends.",
             {"max(done, when) + seconds": "end + seconds"}),
        Slip("You count all of communication as exposed. What runs before the end of backward is "
             "hidden.", {"exposed = done - end": "exposed = sum(sending)"}),
        Slip("What you return second is all communication less what is computed. But the link also "
             "stands still while the rank computes. Exposed is what is left when backward ends.",
             {"exposed = done - end": "exposed = max(0.0, sum(sending) - backward)"},
             {"exposed = done - end": "exposed = max(0.0, sum(sending) - end)"},
             {"exposed = done - end": "exposed = sum(sending) - backward"},
             {"exposed = done - end": "exposed = sum(sending) - end"}),
        Slip("What you return second is the step less backward, so forward is in it, too. Exposed "
             "is what is left when backward ends.",
             {"exposed = done - end": "exposed = done - backward"}),
        Slip("Each layer of your buckets has a ring of its own. A bucket is one all-reduce: add up "
             "its bytes first.",
             {"[ring_seconds(each, ranks, bandwidth, latency) for each in nbytes]":
              "[sum(ring_seconds(layers[index].gradient_bytes, ranks, bandwidth, latency)\n"
              "     for index in bucket) for bucket in buckets]"}),
        Slip("Your step is computing and then all communication: nothing overlaps. A bucket leaves "
             "as soon as its own gradients are there and the link is free, and backward goes on "
             "meanwhile; backward begins with the last layer, whose gradients are there first.",
             {"done = 0.0": "done = end"},
             {"done = 0.0": "done = end", "exposed = done - end": "exposed = sending[-1]"}),
        Slip("You took the longer one of backward and communication. But nothing can be sent "
             "before the first bucket is ready, nor while the link waits for the next one.",
             {"step = done": "step = done = forward + max(backward, sum(sending))"}),
        Slip("You take it that the link never waits once it has begun. It does when the next "
             "bucket is not ready yet: follow it bucket by bucket.",
             {"done = 0.0": "done = ready[0]", "max(done, when)": "done"},
             {"done = 0.0": "done = ready[0]", "max(done, when)": "done",
              "step = done": "step = done = max(end, done)"}),
        Slip("You let all-reduces run side by side, each at the full bandwidth. They share one "
             "link: a bucket starts when it is ready and the one before it is done.",
             {"max(done, when) + seconds": "max(done, when + seconds)"}),
        Slip("What you return second is when the last all-reduce ends. Exposed is only what comes "
             "after the end of backward.", {"exposed = done - end": "exposed = done"}),
        Slip("The step begins with forward, and you begin with backward.",
             {"end = forward + backward": "end = backward"},
             {"step = done": "step = done - forward"}),
        Slip("You go through the layers from the first to the last. Backward begins with the last "
             "one.", {"forward = sum(": "layers = layers[::-1]\nforward = sum("},
             {"reversed(range(len(layers)))": "range(len(layers))"}),
        Slip("Each layer's gradient travels by itself. Ask `make_buckets` which ones go together.",
             {"make_buckets(gradients, bucket_bytes, first_bytes)":
              "[[index] for index in range(len(layers))[::-1]]"},
             {"(gradients, bucket_bytes, first_bytes)": "(gradients, 1)"}),
        Slip("The first bucket may close earlier than the others: hand `first_bytes` on to "
             "`make_buckets`.", {"bucket_bytes, first_bytes)": "bucket_bytes)"}),
        Slip("A bucket leaves with its first gradient. It is complete with its last one.",
             {"bucket[-1]": "bucket[0]"},
             {"bucket[-1]": "bucket[0]", "step = done": "step = done = max(end, done)"}),
        Slip("A gradient is there when its layer's backward has ended, not when it begins.",
             {"[: bucket[-1]]": "[: bucket[-1] + 1]"},
             {"[: bucket[-1]]": "[: bucket[-1] + 1]",
              "step = done": "step = done = max(end, done)"}),
        Slip("What you return second is hidden. Exposed is the rest.",
             {"exposed = done - end": "exposed = sum(sending) - done + end"}),
        Slip("The order of the two numbers: the step first, then the exposed part.",
             {"return step, exposed": "return exposed, step"}),
        Slip("You took an all-reduce for one message. A ring all-reduce has 2(N-1) of them, with "
             "n/N bytes each: `ring_seconds`.",
             {"ring_seconds(each, ranks, bandwidth, latency)": "latency + each / bandwidth"},
             {"ring_seconds(each, ranks, bandwidth, latency)": "latency + each / bandwidth",
              "step = done": "step = done = max(end, done)"}),
        Slip("You took the bandwidth for the latency, and the latency for the bandwidth: "
             "`ring_seconds(nbytes, ranks, bandwidth, latency)`.",
             {"(each, ranks, bandwidth, latency)": "(each, ranks, latency, bandwidth)"}),
        Slip("The latency counts for each of the ring's 2(N-1) messages: they go one after "
             "another. `ring_seconds` knows.",
             {"ring_seconds(each, ranks, bandwidth, latency)":
              "latency + 2 * (ranks - 1) / ranks * each / bandwidth"}),
    )


def names_of(name, layers, bucket_bytes, ranks):
    """Of a case's three facts."""
    where = (f"with {name} ({len(layers)} layers, buckets of {bucket_bytes:g} bytes, "
             f"{ranks} rank{'s' * (ranks > 1)})")
    return (f"the kind of answer {where}", f"the seconds of the step {where}",
            f"the exposed seconds {where}")


def step_facts(case, answer):
    pair = isinstance(answer, tuple | list) and len(answer) == 2
    numbers = map(rounded, answer) if pair else (None, None)
    kind = "two numbers" if pair else type(answer).__name__
    return dict(zip(names_of(*case[:4]), (kind, *numbers), strict=True))


def rounded(value):
    """A whole number as a float, and what rounding leaves of nothing as 0."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 0.0 if abs(value) < 1e-12 else float(value)
    return value
