"""How long halving and doubling takes, where N is a power of two and where it is not."""

import math

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases
from dplab.exercises.ring_seconds import seconds_of


def halving_seconds(nbytes, ranks, bandwidth, latency):
    steps = ranks.bit_length() - 1
    paired = 2**steps  # so many ranks halve and double
    half = steps * latency + (paired - 1) / paired * nbytes / bandwidth
    extra = latency + nbytes / bandwidth if ranks > paired else 0
    return 2 * (half + extra)


def step_by_step(nbytes, ranks, bandwidth, latency):
    seconds, paired, piece = 0, 1, nbytes
    while 2 * paired <= ranks:
        paired, piece = 2 * paired, piece / 2
        seconds += 2 * (latency + piece / bandwidth)
    if ranks > paired:
        seconds += 2 * (latency + nbytes / bandwidth)
    return seconds


# nbytes, ranks, bandwidth, latency
CASES = ((28_000_000_000, 8, 50e9, 14e-6), (4000, 1024, 450e9, 3.4e-6), (60_000, 2, 2e8, 4e-4),
         (900_000, 16, 3e9, 5e-5), (1000, 1, 1e9, 1e-6), (50_000_000, 6, 12.5e9, 14e-6),
         (7_000_000, 12, 1e9, 1e-3), (400_000, 3, 3e9, 5e-5), (90_000, 1000, 1e9, 1e-6))


class HalvingSeconds(Calculation):
    number = "3.6"
    title = "The seconds of halving and doubling"
    minutes = 10
    solution = staticmethod(halving_seconds)
    also_right = (step_by_step,)

    def trial(self, attempt):
        return of_cases(seconds_of, CASES, attempt)

    def expected(self, world_size):
        return of_cases(seconds_of, CASES, halving_seconds)

    def terms(self):
        cases = {"a power of two": {}, "another N": {}}
        for case in CASES:
            nbytes, ranks, bandwidth, latency = case
            steps, whole = int(math.log2(ranks)), nbytes / bandwidth
            sizes = {"the latency of one message": latency,
                     "the latency of log₂P messages": steps * latency,
                     "the bytes of the whole tensor": whole,
                     "the bytes of P−1 chunks of M/P": (2**steps - 1) / 2**steps * whole,
                     "the bytes of log₂P whole tensors": steps * whole}
            if ranks > 1:
                common = "a power of two" if ranks == 2**steps else "another N"
                cases[common] |= {fact: sizes for fact in seconds_of(case, None)}
        return cases

    hints = (
        "Take eight ranks. How many times can a rank halve what it holds, until one chunk is left? "
        "How many bytes does each of these messages carry?",
        "Halving sends M/2, M/4, … down to one chunk, M/P, and doubling sends the same sizes in "
        "the other order. The ranks that are left over send at the same time as one another.",
        "With P the largest power of two that is not above N, each half takes log₂P messages, and "
        "their sizes add up to (P-1)/P of nbytes. If N is larger than P, two messages of nbytes "
        "come on top.",
    )
    slips = (
        Slip("This is one half of it. Doubling costs as much as halving, and ranks that are left "
             "over send in the beginning and receive at the end.",
             {"2 * (half + extra)": "half + extra"},
             {"2 * (latency + piece": "(latency + piece",
              "2 * (latency + nbytes": "(latency + nbytes"}),
        Slip("The ranks that are left over do two things: they send in the beginning, and they "
             "receive the sum at the end.", {"2 * (half + extra)": "2 * half + extra"}),
        Slip("Where N is no power of two, ranks are left over. What they send and receive belongs "
             "to the chain.", {"if ranks > paired else 0": "* 0"},
             {"latency + nbytes / bandwidth if ranks > paired else 0": "0"}),
        Slip("There is no part of a step. Only a power of two of the ranks can halve in pairs, and "
             "the others are left over.",
             {"ranks.bit_length() - 1": "math.log2(ranks)",
              "latency + nbytes / bandwidth if ranks > paired else 0": "0"}),
        Slip("You rounded the number of steps up, as if there were more ranks than there are. The "
             "power of two that is not above N halves, and the others are left over.",
             {"ranks.bit_length() - 1": "math.ceil(math.log2(ranks))"}),
        Slip("You charge for ranks that are left over where N is a power of two. Then there are "
             "none.", {" if ranks > paired else 0": ""}),
        Slip("The ranks that are left over do not wait for one another: each sends to another "
             "rank, at the same time.",
             {"latency + nbytes / bandwidth if ranks > paired else 0":
              "(ranks - paired) * (latency + nbytes / bandwidth)"}),
        Slip("A rank that is left over sends its whole tensor: it has a message of its own, with "
             "a latency and all the bytes.",
             {"latency + nbytes / bandwidth if": "latency if"},
             {"latency + nbytes / bandwidth if": "nbytes / bandwidth if"},
             {"latency + nbytes / bandwidth if": "latency + nbytes / 2 / bandwidth if"},
             {"latency + nbytes / bandwidth if": "latency + nbytes / paired / bandwidth if"},
             {"latency + nbytes / bandwidth if": "latency + nbytes / ranks / bandwidth if"}),
        Slip("Here each message carries the whole tensor. A rank sends the half that its partner "
             "keeps, then half of what is left, and so on.",
             {"(paired - 1) / paired * nbytes": "steps * nbytes"}),
        Slip("Here each message carries half of the tensor. Only the first does: then a rank holds "
             "half, and sends half of that.",
             {"(paired - 1) / paired * nbytes": "steps * nbytes / 2"}),
        Slip("Here each message carries one chunk, as on a ring. In halving only the last one "
             "does: the first carries half of the tensor.",
             {"(paired - 1) / paired * nbytes": "steps * nbytes / paired"}),
        Slip("Your first message carries the whole tensor. A rank keeps one half and sends the "
             "other.", {"(paired - 1) / paired": "2 * (paired - 1) / paired"}),
        Slip("The halves end at M/P, where P ranks halve in pairs. The ranks that are left over "
             "get no chunk.", {"(paired - 1) / paired": "(ranks - 1) / ranks"}),
        Slip("The sizes M/2, M/4, … end at one chunk. Together they are less than the tensor.",
             {"(paired - 1) / paired * nbytes": "nbytes"}),
        Slip("That many messages follow one another on a ring. Here each step halves what a rank "
             "holds, until one chunk is left: count the steps.",
             {"steps * latency": "(ranks - 1) * latency"},
             {"steps * latency": "(paired - 1) * latency"}),
        Slip("Each step's message has a latency of its own.",
             {"steps * latency + (": "latency + ("}, {"steps * latency + (": "("}),
        Slip("You multiplied by the bandwidth. Bytes over bytes per second are seconds.",
             {"/ bandwidth": "* bandwidth"}),
    )
