"""The seconds of one step of `fully_shard`, from what each of its units takes alone."""

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases
from dplab.predict.cluster import fsdp_spans
from dplab.predict.step import Layer, step_seconds


def step_by_hand(layers, block, root, slowdown, update):
    forward, backward, gather, scatter = block
    root_forward, root_backward, root_gather, root_scatter = root

    def beside(computing, sending):
        slowed = computing + (1 - 1 / slowdown) * sending
        return max(slowed, sending)

    seconds = root_gather + gather  # nothing computes yet
    seconds += (layers - 1) * beside(forward, gather)
    seconds += forward + root_forward
    seconds += beside(root_backward, gather)  # of the last block, again
    seconds += beside(backward, gather)
    seconds += (layers - 2) * beside(backward, gather + scatter)
    seconds += beside(backward, scatter)
    seconds += scatter + root_scatter  # nothing computes any more
    return seconds + update


def by_the_simulator(layers, block, root, slowdown, update):
    def unit(name, place):
        return Layer(block[0] if place else root[0], block[1] if place else root[1], place, name)

    spans = fsdp_spans(
        [unit(f"block {number}", 1) for number in range(layers)], unit("root", 0),
        gather=lambda place: block[2] if place else root[2],
        scatter=lambda place: block[3] if place else root[3],
        slowdown=slowdown, optimizer_seconds=update)
    return step_seconds(spans)


# Blocks; forward, backward, gather and reduce-scatter of a block, and of the root, in whole
# seconds; the slowdown; the update.
CASES = (
    (32, (8, 17, 2, 3), (22, 41, 7, 13), 1.25, 2),  # all of it hides, nearly as on 64 GPUs
    (3, (50, 110, 7, 15), (90, 200, 11, 23), 1.0, 5),  # computing loses nothing
    (2, (40, 90, 6, 10), (30, 70, 9, 14), 1.25, 3),
    (5, (10, 21, 9, 17), (8, 30, 12, 26), 1.25, 1),  # backward is too short for both
    (4, (3, 7, 11, 19), (5, 9, 31, 41), 1.25, 2),  # nothing is long enough
    (12, (20, 41, 16, 13), (60, 13, 29, 31), 1.6, 4),  # slowed down, they nearly are
)
FIRST = "root_gather + gather  # nothing computes yet"
SLOWED = "computing + (1 - 1 / slowdown) * sending"
MIDDLE = "(layers - 2) * beside(backward, gather + scatter)"
LAST = "scatter + root_scatter  # nothing computes any more"


class StepByHand(Calculation):
    number = "11.1"
    title = "One step by hand"
    minutes = 25
    solution = staticmethod(step_by_hand)
    also_right = (by_the_simulator,)

    def trial(self, attempt):
        return of_cases(_fact_of, CASES, attempt)

    def expected(self, world_size):
        return of_cases(_fact_of, CASES, by_the_simulator)

    hints = (
        "Go through the figure from left to right. What is computed, piece by piece? And what is "
        "sent while each piece computes: nothing, a gather, a reduce-scatter, or both?",
        "A piece that computes for c seconds beside a collective of g seconds ends after g, or "
        "later. If it ends later: while the collective goes on, computing gets g / slowdown done. "
        "How much is left then?",
        "beside(c, g) = max(g, c + (1 − 1/slowdown) · g). Forward: layers − 1 blocks run beside a "
        "gather, the last one and the root beside nothing. Backward: the root and the last block "
        "run beside a gather, the first block beside a reduce-scatter, the others beside both.",
    )
    slips = (
        # What one pair of them takes.
        Slip("You add what is sent to what is computed. They go on at the same time: after the "
             "longer one both are done, if computing is not slowed down.",
             {"return max(slowed, sending)": "return computing + sending"}),
        Slip("You leave the slowdown out. While a collective of g seconds goes on, computing gets "
             "only g / slowdown done.", {SLOWED: "computing"}),
        Slip("You slow all of a unit's computing down. It is slow only while the collective goes "
             "on.", {SLOWED: "computing * slowdown"}),
        Slip("While a collective of g seconds goes on, computing gets g / slowdown done, so it "
             "loses (1 − 1/slowdown) · g. You took (slowdown − 1) · g.",
             {SLOWED: "computing + (slowdown - 1) * sending"},
             {SLOWED: "computing + (slowdown - 1) * min(computing, sending)"}),
        Slip("You stretch the collective. It takes as long as alone: what becomes slower beside it "
             "is computing.",
             {"return max(slowed, sending)": "return max(computing, slowdown * sending)"},
             {"return max(slowed, sending)": "return max(slowed, slowdown * sending)"}),
        Slip("You end the slowdown after the seconds that computing takes alone. Slowed down, it "
             "takes longer, and the collective may still go on.",
             {SLOWED: "computing + (1 - 1 / slowdown) * min(computing, sending)"}),
        Slip("You let computing hide any collective. Where the collective is longer than what it "
             "runs beside, the next unit waits for it.",
             {"return max(slowed, sending)": "return slowed"}),
        Slip("You compare all of backward with all that is sent beside it. Each unit has to hide "
             "its own: what one has left over does not help the next.",
             {"+= beside(root_backward, gather)": "+= beside(root_backward + layers * backward, "
                                                  "layers * gather + (layers - 1) * scatter)",
              "+= beside(backward, gather)": "+= 0", MIDDLE: "0",
              "+= beside(backward, scatter)": "+= 0"}),
        # What nothing hides.
        Slip("Your beginning is too short. Before anything computes, the root and the first block "
             "have to be there, gathered one after the other.",
             {FIRST: "0"}, {FIRST: "root_gather"}, {FIRST: "gather"},
             {FIRST: "max(root_gather, gather)"}),
        Slip("You leave out the end. After the last backward, that of the first block, its "
             "gradients and the root's are still to be reduced.",
             {LAST: "0"}, {LAST: "scatter"}, {LAST: "root_scatter"}),
        Slip("You gather the root again for backward. It stays whole from its gather to its "
             "reduce-scatter.",
             {"beside(root_backward, gather)": "beside(root_backward, gather + root_gather)"},
             {"beside(root_backward, gather)": "root_gather + beside(root_backward, gather)"}),
        Slip("You hide the root's reduce-scatter. In the figure it comes last, after all of "
             "backward, beside nothing.",
             {"+= beside(backward, gather)": "+= beside(backward, gather + root_scatter)",
              LAST: "scatter"},
             {"+= beside(backward, scatter)": "+= beside(backward, scatter + root_scatter)",
              LAST: "scatter"},
             {"+= beside(root_backward, gather)": "+= beside(root_backward, gather + root_scatter)",
              LAST: "scatter"}),
        # What runs beside what.
        Slip("Your root's backward runs beside nothing. The last block was freed after its "
             "forward, so it is gathered again while the root computes its backward.",
             {"beside(root_backward, gather)": "root_backward"}),
        Slip("Your backward gathers nothing. After forward the blocks were freed, so backward "
             "gathers each of them again.",
             {"beside(root_backward, gather)": "root_backward",
              "+= beside(backward, gather)": "+= backward",
              MIDDLE: "(layers - 2) * beside(backward, scatter)"}),
        Slip("You reduce no block's gradients but the first one's.",
             {MIDDLE: "(layers - 2) * beside(backward, gather)",
              "+= beside(backward, scatter)": "+= backward"}),
        Slip("You let a gather and a reduce-scatter go on at the same time in backward. They go "
             "one after the other, so a block has to hide their sum.",
             {MIDDLE: "(layers - 2) * beside(backward, max(gather, scatter))"}),
        Slip("You let too many blocks of backward run beside a gather and a reduce-scatter. When "
             "the last block begins, no block has gradients to reduce yet; and when the first "
             "block runs, none is left to be gathered.",
             {"+= beside(backward, gather)": "+= beside(backward, gather + scatter)"},
             {"+= beside(backward, scatter)": "+= beside(backward, gather + scatter)"},
             {"+= beside(backward, gather)": "+= beside(backward, gather + scatter)",
              "+= beside(backward, scatter)": "+= beside(backward, gather + scatter)"}),
        Slip("Your last block's forward runs beside a gather. Its next unit is the root, which is "
             "whole already.", {"+= forward + root_forward":
                                "+= beside(forward, gather) + root_forward"}),
        Slip("The root's forward hides nothing in the figure: backward's first gather starts when "
             "it is done.", {"+= forward + root_forward":
                             "+= forward + beside(root_forward, gather)",
                             "beside(root_backward, gather)": "root_backward"}),
        # What is computed.
        Slip("You compute more blocks than there are. Forward: all but the last one beside a "
             "gather, and that one. Backward: the last one beside a gather, the first one beside a "
             "reduce-scatter, the others beside both.",
             {MIDDLE: "(layers - 1) * beside(backward, gather + scatter)"},
             {MIDDLE: "layers * beside(backward, gather + scatter)"},
             {"(layers - 1) * beside(forward, gather)": "layers * beside(forward, gather)"}),
        Slip("You leave the update out.", {"seconds + update": "seconds"}),
        Slip("You leave out what the root computes: the embedding, the last norm, the head and "
             "the loss, forward and backward.",
             {"forward + root_forward": "forward",
              "beside(root_backward, gather)": "gather"}),
    )


def _fact_of(case, answer):
    layers, block, root, slowdown, update = case
    return {f"the seconds of {layers} blocks of {block}, root {root}, slowdown {slowdown:g}, "
            f"update {update}": float(answer) if isinstance(answer, int) else answer}
