"""Exercise 5.4: a scheduler: how long will the step take?."""

from dplab.checks.exercise import Calculation, Mistake
from dplab.checks.trials import of_cases
from dplab.exercises.make_buckets import make_buckets
from dplab.exercises.ring_seconds import ring_seconds
from dplab.predict.step import Layer


def predict_step(layers, bucket_bytes, ranks, bandwidth, latency):
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
    for bucket in make_buckets([layer.gradient_bytes for layer in layers], bucket_bytes):
        nbytes = sum(layers[index].gradient_bytes for index in bucket)
        start = max(free, ready[bucket[-1]])
        free = start + ring_seconds(nbytes, ranks, bandwidth, latency)
    return free, free - now


def _schedule(layers, bucket_bytes):
    """When forward and backward end, and for each bucket when it is ready, and its bytes."""
    forward = now = sum(layer.forward_seconds for layer in layers)
    ready = [0.0] * len(layers)
    for index in reversed(range(len(layers))):
        now += layers[index].backward_seconds
        ready[index] = now
    buckets = make_buckets([layer.gradient_bytes for layer in layers], bucket_bytes)
    return forward, now, [(ready[bucket[-1]], sum(layers[index].gradient_bytes for index in bucket))
                          for bucket in buckets]


def counts_the_last_bucket(layers, bucket_bytes, ranks, bandwidth, latency):
    _, end, buckets = _schedule(layers, bucket_bytes)
    exposed = ring_seconds(buckets[-1][1], ranks, bandwidth, latency)
    return end + exposed, exposed


def counts_all_communication(layers, bucket_bytes, ranks, bandwidth, latency):
    step, _ = predict_step(layers, bucket_bytes, ranks, bandwidth, latency)
    _, _, buckets = _schedule(layers, bucket_bytes)
    return step, sum(ring_seconds(nbytes, ranks, bandwidth, latency) for _, nbytes in buckets)


def sending_less_backward(layers, bucket_bytes, ranks, bandwidth, latency):
    step, sending = counts_all_communication(layers, bucket_bytes, ranks, bandwidth, latency)
    return step, max(0.0, sending - sum(layer.backward_seconds for layer in layers))


def sending_less_computing(layers, bucket_bytes, ranks, bandwidth, latency):
    step, sending = counts_all_communication(layers, bucket_bytes, ranks, bandwidth, latency)
    _, end, _ = _schedule(layers, bucket_bytes)
    return step, max(0.0, sending - end)


def exposes_forward(layers, bucket_bytes, ranks, bandwidth, latency):
    step, exposed = predict_step(layers, bucket_bytes, ranks, bandwidth, latency)
    return step, exposed + sum(layer.forward_seconds for layer in layers)


def a_ring_for_each_layer(layers, bucket_bytes, ranks, bandwidth, latency):
    _, end, buckets = _schedule(layers, bucket_bytes)
    indices = make_buckets([layer.gradient_bytes for layer in layers], bucket_bytes)
    free = 0.0
    for bucket, (ready, _) in zip(indices, buckets, strict=True):
        free = max(free, ready) + sum(
            ring_seconds(layers[index].gradient_bytes, ranks, bandwidth, latency)
            for index in bucket)
    return free, free - end


def after_backward(layers, bucket_bytes, ranks, bandwidth, latency):
    _, end, buckets = _schedule(layers, bucket_bytes)
    sending = sum(ring_seconds(nbytes, ranks, bandwidth, latency) for _, nbytes in buckets)
    return end + sending, sending


def longer_of_the_two(layers, bucket_bytes, ranks, bandwidth, latency):
    forward, end, buckets = _schedule(layers, bucket_bytes)
    sending = sum(ring_seconds(nbytes, ranks, bandwidth, latency) for _, nbytes in buckets)
    step = forward + max(end - forward, sending)
    return step, step - end


def never_waits_for_a_bucket(layers, bucket_bytes, ranks, bandwidth, latency):
    _, end, buckets = _schedule(layers, bucket_bytes)
    free = buckets[0][0] + sum(ring_seconds(nbytes, ranks, bandwidth, latency)
                               for _, nbytes in buckets)
    return max(end, free), max(0.0, free - end)


def side_by_side(layers, bucket_bytes, ranks, bandwidth, latency):
    _, end, buckets = _schedule(layers, bucket_bytes)
    free = max(ready + ring_seconds(nbytes, ranks, bandwidth, latency)
               for ready, nbytes in buckets)
    return free, free - end


def exposed_since_the_start(layers, bucket_bytes, ranks, bandwidth, latency):
    step, _ = predict_step(layers, bucket_bytes, ranks, bandwidth, latency)
    return step, step


def without_forward(layers, bucket_bytes, ranks, bandwidth, latency):
    step, exposed = predict_step(layers, bucket_bytes, ranks, bandwidth, latency)
    return step - sum(layer.forward_seconds for layer in layers), exposed


def begins_with_the_first_layer(layers, bucket_bytes, ranks, bandwidth, latency):
    return predict_step(layers[::-1], bucket_bytes, ranks, bandwidth, latency)


def each_layer_by_itself(layers, bucket_bytes, ranks, bandwidth, latency):
    return predict_step(layers, 1e-9, ranks, bandwidth, latency)


def ready_with_the_first_gradient(layers, bucket_bytes, ranks, bandwidth, latency):
    _, end, buckets = _schedule(layers, bucket_bytes)
    _, _, single = _schedule(layers, 1e-9)
    indices = make_buckets([layer.gradient_bytes for layer in layers], bucket_bytes)
    free = 0.0
    for bucket, (_, nbytes) in zip(indices, buckets, strict=True):
        ready = single[len(layers) - 1 - bucket[0]][0]
        free = max(free, ready) + ring_seconds(nbytes, ranks, bandwidth, latency)
    return max(end, free), max(0.0, free - end)


def ready_before_its_layer(layers, bucket_bytes, ranks, bandwidth, latency):
    _, end, buckets = _schedule(layers, bucket_bytes)
    indices = make_buckets([layer.gradient_bytes for layer in layers], bucket_bytes)
    free = 0.0
    for bucket, (ready, nbytes) in zip(indices, buckets, strict=True):
        ready -= layers[bucket[-1]].backward_seconds
        free = max(free, ready) + ring_seconds(nbytes, ranks, bandwidth, latency)
    return max(end, free), max(0.0, free - end)


def backward_waits(layers, bucket_bytes, ranks, bandwidth, latency):
    now = sum(layer.forward_seconds for layer in layers)
    sending = 0.0
    for bucket in make_buckets([layer.gradient_bytes for layer in layers], bucket_bytes):
        nbytes = sum(layers[index].gradient_bytes for index in bucket)
        seconds = ring_seconds(nbytes, ranks, bandwidth, latency)
        now += sum(layers[index].backward_seconds for index in bucket) + seconds
        sending += seconds
    return now, seconds


def hidden_for_exposed(layers, bucket_bytes, ranks, bandwidth, latency):
    step, exposed = predict_step(layers, bucket_bytes, ranks, bandwidth, latency)
    _, _, buckets = _schedule(layers, bucket_bytes)
    sending = sum(ring_seconds(nbytes, ranks, bandwidth, latency) for _, nbytes in buckets)
    return step, sending - exposed


def exposed_first(layers, bucket_bytes, ranks, bandwidth, latency):
    return predict_step(layers, bucket_bytes, ranks, bandwidth, latency)[::-1]


def on_a_link(seconds):
    """A scheduler that takes another time for an all-reduce."""

    def predicts(layers, bucket_bytes, ranks, bandwidth, latency):
        _, end, buckets = _schedule(layers, bucket_bytes)
        free = 0.0
        for ready, nbytes in buckets:
            free = max(free, ready) + seconds(nbytes, ranks, bandwidth, latency)
        return max(end, free), max(0.0, free - end)

    return predicts


def one_message(nbytes, ranks, bandwidth, latency):
    return latency + nbytes / bandwidth


def one_latency(nbytes, ranks, bandwidth, latency):
    return latency + 2 * (ranks - 1) / ranks * nbytes / bandwidth


def swaps_the_link(nbytes, ranks, bandwidth, latency):
    return ring_seconds(nbytes, ranks, latency, bandwidth)


class PredictStep(Calculation):
    number = "5.4"
    title = "A scheduler: how long will the step take?"
    minutes = 25
    hints = (
        "Two clocks: one is when backward has computed up to some layer, the other one is when the "
        "link will be free again. Which of the two decides when a bucket leaves?",
        "First walk through the layers from the last to the first and note when each one's "
        "gradient is ready. Then walk through your buckets: which of its gradients completes one?",
        "A bucket starts at `max(free, ready)` of its last index, and `free` is then the start "
        "plus `ring_seconds` of its bytes. The step ends at `free`; exposed is what lies behind "
        "the end of backward.",
    )
    solution = staticmethod(predict_step)
    mistakes = (
        Mistake(counts_the_last_bucket, "You count the last bucket only. Where the link is slow, "
                "those before it are still on their way when backward ends."),
        Mistake(counts_all_communication, "The step is right. You count all of communication as "
                "exposed. What runs before the end of backward is hidden."),
        *(Mistake(attempt, "The step is right. What you return second is all communication less "
                  "what is computed. But the link also stands still while the rank computes. "
                  "Exposed is what is left when backward ends.")
          for attempt in (sending_less_backward, sending_less_computing)),
        Mistake(exposes_forward, "The step is right. You return it less backward, so forward is in "
                "it, too. Exposed is what is left when backward ends."),
        Mistake(a_ring_for_each_layer, "Each layer of your buckets has a ring of its own. A bucket "
                "is one all-reduce: add up its bytes first."),
        Mistake(after_backward, "Your first bucket leaves when backward is over. Each leaves as "
                "soon as its own gradients are there and the link is free; backward begins with "
                "the last layer, whose gradients are there first."),
        Mistake(longer_of_the_two, "You took the longer one of backward and communication. But "
                "nothing can be sent before the first bucket is ready, nor while the link waits "
                "for the next one."),
        Mistake(never_waits_for_a_bucket, "You take it that the link never waits once it has "
                "begun. It does when the next bucket is not ready yet: follow it bucket by "
                "bucket."),
        Mistake(side_by_side, "You let all-reduces run side by side, each at the full bandwidth. "
                "They share one link: a bucket starts when it is ready and the one before it is "
                "done."),
        Mistake(exposed_since_the_start, "You return when the last all-reduce ends. Exposed is "
                "only what comes after the end of backward."),
        Mistake(without_forward, "The step begins with forward, and you begin with backward."),
        Mistake(begins_with_the_first_layer, "You go through the layers from the first to the "
                "last. Backward begins with the last one."),
        Mistake(each_layer_by_itself, "Each layer's gradient travels by itself. Ask "
                "`make_buckets` which ones go together."),
        Mistake(ready_with_the_first_gradient, "A bucket leaves with its first gradient. It is "
                "complete with its last one."),
        Mistake(ready_before_its_layer, "A gradient is there when its layer's backward has ended, "
                "not when it begins."),
        Mistake(backward_waits, "In yours, backward waits for each bucket to arrive. Backward goes "
                "on while the link works."),
        Mistake(hidden_for_exposed, "The step is right. What you return second is hidden. Exposed "
                "is the rest."),
        Mistake(exposed_first, "The order of the two numbers: the step first, then the exposed "
                "part."),
        Mistake(on_a_link(one_message), "You took an all-reduce for one message. A ring "
                "all-reduce has 2(N-1) of them, with n/N bytes each: `ring_seconds`."),
        Mistake(on_a_link(swaps_the_link), "You took the bandwidth for the latency, and the "
                "latency for the bandwidth: `ring_seconds(nbytes, ranks, bandwidth, latency)`."),
        Mistake(on_a_link(one_latency), "The latency counts for each of the ring's 2(N-1) "
                "messages: they go one after another. `ring_seconds` knows."),
    )

    def trial(self, attempt):
        return of_cases(_step_facts, _CASES, lambda name, layers, *rest: attempt(
            list(layers), *rest))

    def expected(self, world_size):
        return of_cases(_step_facts, _CASES, lambda name, layers, *rest: predict_step(
            layers, *rest))


def _layers(*numbers):
    """From (forward ms, backward ms, MB of gradients)."""
    return [Layer(forward / 1e3, backward / 1e3, megabytes * 1e6)
            for forward, backward, megabytes in numbers]

_UNEVEN = _layers((3, 7, 10), (2, 9, 30), (4, 11, 20), (5, 13, 25), (1, 6, 5))

# By what each is about: layers, bytes of a bucket, ranks, bytes/s and s of the link.
_CASES = (
    ("a link that is late at the end", _UNEVEN, 30e6, 4, 5e9, 1e-4),
    ("a link that falls behind", _UNEVEN, 25e6, 3, 1.25e9, 5e-5),
    ("a pause between two buckets", _layers((1, 150, 1), (2, 190, 80), (3, 10, 3)), 3e6, 2, 1e9,
     1e-3),
    ("latency alone", _layers(*[(0.2, 1, 0.004)] * 5), 4e3, 64, 5e10, 1.4e-5),
    ("one bucket", _UNEVEN, 1e12, 8, 2e9, 1e-4),
    ("one rank", _UNEVEN, 30e6, 1, 5e9, 1e-4),
)


def _step_facts(case, answer):
    name, layers, bucket_bytes, ranks, *_ = case
    where = (f"with {name} ({len(layers)} layers, buckets of {bucket_bytes:g} bytes, "
             f"{ranks} rank{'s' * (ranks > 1)})")
    pair = answer if isinstance(answer, tuple | list) and len(answer) == 2 else (None, None)
    return {f"the kind of answer {where}": "two numbers" if pair is answer else
            type(answer).__name__, f"the seconds of the step {where}": _as_float(pair[0]),
            f"the exposed seconds {where}": _as_float(pair[1])}


def _as_float(value):
    """A whole number as a float, and what rounding leaves of nothing as 0."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 0.0 if abs(value) < 1e-12 else float(value)
    return value
