"""When each unit is gathered and reduced, one after another or one ahead."""

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases
from dplab.exercises.predict_step import layers_of
from dplab.exercises.ring_seconds import ring_seconds


def predict_sharded_step(layers, ranks, bandwidth, latency, ahead):
    """The seconds of a step whose layers are gathered before they compute, or one of them ahead."""
    work = [(layer, layer.forward_seconds, False) for layer in layers]
    work += [(layer, layer.backward_seconds, True) for layer in reversed(layers)]
    begin = end = free = 0.0  # of the layer that computes; when the link is free
    owed = 0.0  # seconds of the last layer's reduce-scatter
    for layer, seconds, is_backward in work:
        half = ring_seconds(layer.gradient_bytes, ranks, bandwidth, latency) / 2
        if ahead:
            arrived = max(free, begin) + half  # launched when the layer before it began
            free = max(arrived, end) + owed if owed else arrived
        else:
            arrived = end + owed + half
        begin = max(end, arrived)
        end = begin + seconds
        owed = half if is_backward else 0.0
    return max(free, end) + owed


def by_two_lists(layers, ranks, bandwidth, latency, ahead):
    """The same with the times of all collectives noted."""
    order = list(layers) + list(layers)[::-1]
    computing = ([layer.forward_seconds for layer in layers]
                 + [layer.backward_seconds for layer in layers][::-1])
    halves = [ring_seconds(layer.gradient_bytes, ranks, bandwidth, latency) / 2 for layer in order]
    reductions = [0.0] * len(layers) + halves[len(layers):]
    if not ahead:
        return sum(computing) + sum(halves) + sum(reductions)
    link = begun = done = 0.0
    for number in range(len(order)):
        link = max(link, begun) + halves[number]
        here = link
        if number and reductions[number - 1]:
            link = max(link, done) + reductions[number - 1]
        begun = max(done, here)
        done = begun + computing[number]
    return max(link, done) + reductions[-1]


UNEVEN = layers_of((3, 7, 10), (2, 9, 30), (4, 11, 20), (5, 13, 25), (1, 6, 5))

# By what each is about: layers, ranks, bytes/s and seconds of the link, and whether one is ahead.
CASES = (
    ("one after another", UNEVEN, 4, 5e9, 1e-4, False),
    ("one ahead, on a fast link", UNEVEN, 4, 5e10, 1e-4, True),
    ("one ahead, on a link that is late", UNEVEN, 4, 5e9, 1e-4, True),
    ("one ahead, on a slow link", UNEVEN, 3, 1e9, 5e-5, True),
    ("one ahead, where it counts what goes first", UNEVEN, 3, 3e9, 1e-4, True),
    ("two layers, one ahead", layers_of((4, 9, 30), (6, 11, 10)), 2, 4e9, 1e-3, True),
    ("two layers, one after another", layers_of((4, 9, 30), (6, 11, 10)), 2, 4e9, 1e-3, False),
    ("latency alone, one ahead", layers_of(*[(0.2, 0.5, 0.004)] * 5), 64, 5e10, 1.4e-5, True),
)


KEPT = "(0.0 if is_backward and layer is layers[-1] else half)"
RETURN = "return max(link, done) + reductions[-1]"  # of by_two_lists


class PredictShardedStep(Calculation):
    number = "9.4"
    title = "One ahead: how long will the step take?"
    minutes = 20
    solution = staticmethod(predict_sharded_step)
    also_right = (by_two_lists,)

    def trial(self, attempt):
        return of_cases(lambda case, answer: {fact_of(case): answer}, CASES,
                        lambda _, layers, *rest: attempt(list(layers), *rest))

    def expected(self, world_size):
        return self.trial(predict_sharded_step)

    def terms(self):
        found = {}
        for case in CASES:
            if case[-1]:
                continue
            _, layers, *link, _ = case
            found[fact_of(case)] = {
                "forward": sum(layer.forward_seconds for layer in layers),
                "backward": sum(layer.backward_seconds for layer in layers),
                "one all-gather of each layer": sum(
                    ring_seconds(layer.gradient_bytes, *link) for layer in layers) / 2}
        return {"steps without a gather ahead": found}

    def quantities(self, world_size, rank):
        return {"the milliseconds of a second": 1000}

    hints = (
        "First without a gather ahead: nothing overlaps, so the step is a sum. Which collectives "
        "does a layer have in forward, and which in backward?",
        "Write the step as one list of what is computed: the layers in order, and then in reverse. "
        "With one ahead, keep three times: when the layer began, when it ended, and when the link "
        "is free. In which order does the link get the next layer's gather and this layer's "
        "reduce-scatter?",
        "For each entry: its gather starts at `max(free, begin)` of the entry before it. Then the "
        "reduce-scatter of the entry before it, if that was a backward, starts at `max(free, "
        "end)`. The entry begins at `max(end, arrived)`. The last reduce-scatter comes after all.",
    )
    slips = (
        Slip("An all-gather is half of an all-reduce, and so is a reduce-scatter: `ring_seconds` "
             "counts both halves.", {"latency) / 2": "latency)"}),
        Slip("Backward's gathers are missing. A layer was freed after forward, and is gathered "
             "again.", {"arrived = end + owed + half":
                        "arrived = end + owed + (0.0 if is_backward else half)",
                        "arrived = max(free, begin) + half":
                        "arrived = max(free, begin) + (0.0 if is_backward else half)"},
             {"arrived = end + owed + half":
              "arrived = end + owed + (0.0 if is_backward else half)"}),
        Slip("The last layer stays whole from forward to backward. It is freed after forward too, "
             "and gathered again.",
             {"arrived = end + owed + half": f"arrived = end + owed + {KEPT}",
              "arrived = max(free, begin) + half": f"arrived = max(free, begin) + {KEPT}"}),
        Slip("The reduce-scatters are missing: each layer's gradient travels to its owners.",
             {"owed = half if is_backward else 0.0": "owed = 0.0"}),
        Slip("The last reduce-scatter is missing. Nothing is left to hide it behind.",
             {"max(free, end) + owed": "max(free, end)"}),
        Slip("With one ahead you launch a gather when the layer before it has *ended*. It can "
             "leave when that layer begins.", {"max(free, begin) + half": "max(free, end) + half"}),
        Slip("With one ahead you gather more than one ahead: all gathers leave at the beginning. "
             "Each waits until the layer before it begins.",
             {"max(free, begin) + half": "free + half"}),
        Slip("With one ahead you take computing and communication as two wholes, as if a "
             "collective could hide behind any layer. It hides only behind what computes between "
             "its launch and the moment when its result is needed. So follow the step layer by "
             "layer.",
             {RETURN: "return max(sum(computing), sum(halves) + sum(reductions))"},
             {RETURN: "bare = halves[0] + reductions[-1]\nreturn bare + max("
                      "sum(computing), sum(halves) + sum(reductions) - bare)"}),
        Slip("Your reduce-scatters have a link of their own. They share one with the gathers, in "
             "the order of launch: a gather that is launched after one waits for it.",
             {"link = begun = done = 0.0": "link = begun = done = back = 0.0",
              "link = max(link, done) + reductions[number - 1]":
              "back = max(back, done) + reductions[number - 1]",
              RETURN: "return max(back, done) + reductions[-1]"}),
        Slip("The reduce-scatters come too late, or computing waits for them. Each is launched "
             "when its layer's backward ends, and nobody needs its result before the step ends.",
             {"begin = max(end, arrived)": "begin = max(end, arrived, free)"}),
        Slip("Where a gather and a reduce-scatter are launched at once, you let the gather go "
             "first. The reduce-scatter does.",
             {"link = begun = done = 0.0": "link = begun = done = 0.0\nleft = []",
              "link = max(link, begun) + halves[number]":
              "while left and left[0][0] < begun:\n    launched, half = left.pop(0)\n"
              "    link = max(link, launched) + half\n"
              "link = max(link, begun) + halves[number]",
              "link = max(link, done) + reductions[number - 1]":
              "left.append((done, reductions[number - 1]))",
              RETURN: "for launched, half in left:\n    link = max(link, launched) + half\n"
                      f"{RETURN}"}),
        Slip("In your step the link carries several collectives at once. A gather waits until the "
             "link is free.", {"max(free, begin) + half": "begin + half"}),
    )


def fact_of(case):
    return f"the seconds of the step: {case[0]}"
