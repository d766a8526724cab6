"""What the busiest rank of a collective has to send, over the time it took."""

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def bus_bandwidth(collective, nbytes, ranks, seconds):
    chunk = nbytes / ranks
    # What the busiest rank has to send.
    must_send = {"all_reduce": 2 * (ranks - 1) * chunk,  # N−1 chunks in each of two halves
                 "reduce_scatter": (ranks - 1) * chunk,
                 "all_gather": (ranks - 1) * chunk,
                 "broadcast": nbytes}[collective]  # the root's tensor has to leave the root
    return must_send / seconds


CASES = tuple((collective, nbytes, ranks, seconds)
              for collective in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
              for nbytes, ranks, seconds in ((2**33, 8, 0.05), (3_000_000, 3, 2e-3),
                                             (50_000_000, 16, 4e-3), (600_000, 5, 1e-4)))


class BusBandwidth(Calculation):
    number = "3.8"
    title = "The bus bandwidth of a measured time"
    minutes = 6
    solution = staticmethod(bus_bandwidth)

    def trial(self, attempt):
        return of_cases(bandwidth_of, CASES, attempt)

    def expected(self, world_size):
        return of_cases(bandwidth_of, CASES, bus_bandwidth)

    def terms(self):
        terms = {}
        for case in CASES:
            collective, nbytes, ranks, seconds = case
            chunk = nbytes / ranks / seconds
            sizes = {"the bytes of one chunk": chunk,
                     "the bytes of N−1 chunks": (ranks - 1) * chunk,
                     "the bytes of the whole tensor": ranks * chunk,
                     "the bytes of N−1 whole tensors": (ranks - 1) * ranks * chunk,
                     "the bytes of N whole tensors": ranks**2 * chunk}
            terms.setdefault(collective, {}).update(
                {fact: sizes for fact in bandwidth_of(case, None)})
        return terms

    hints = (
        "How many bytes must the busiest rank send, at the least, in each of the four? You have "
        "counted two halves and a whole. Who is the busiest in a broadcast?",
        "A half of the ring sends N-1 chunks of nbytes/N from each rank, an all-reduce twice as "
        "much. In a broadcast, every byte has to leave the root once.",
        "`factor * nbytes / seconds`, where the factor is 2(N-1)/N for an all-reduce, (N-1)/N for "
        "each half, and 1 for a broadcast.",
    )
    slips = (
        Slip("This is the algorithm bandwidth, the tensor over the time. Count what the busiest "
             "rank has to send for it instead.", {"must_send /": "nbytes /"}),
        Slip("You count an all-reduce each time. A reduce-scatter and an all-gather are half of "
             "one, and a broadcast only brings one tensor out.",
             {"[collective]": '["all_reduce"]'}),
        Slip("An all-reduce is a reduce-scatter and then an all-gather: the busiest rank sends "
             "twice as much as in one half.", {"2 * (ranks - 1)": "(ranks - 1)"}),
        Slip("You let a rank send `nbytes` in each of N-1 steps. That is the whole tensor, all N "
             "chunks together; in each step a rank sends one chunk, an N-th of it.",
             {"chunk = nbytes / ranks": "chunk = nbytes"},
             {"2 * (ranks - 1) * chunk": "2 * (ranks - 1) * nbytes"},
             {'": (ranks - 1) * chunk': '": (ranks - 1) * nbytes'},
             {'scatter": (ranks - 1) * chunk': 'scatter": (ranks - 1) * nbytes'},
             {'gather": (ranks - 1) * chunk': 'gather": (ranks - 1) * nbytes'}),
        Slip("Each half of the ring has N-1 steps, not N: nobody sends to itself.",
             {"ranks - 1": "ranks"}, {"2 * (ranks - 1)": "2 * ranks"},
             {'": (ranks - 1)': '": ranks'}),
        Slip("A rank sends more than its own chunk in a half of the ring: one chunk in each of N-1 "
             "steps.", {"(ranks - 1) * chunk": "chunk"}, {'": (ranks - 1) * chunk': '": chunk'}),
        Slip("In a broadcast only the root has the tensor, so every byte of it must leave the "
             "root: nbytes, and not a part of it.",
             {'"broadcast": nbytes': '"broadcast": (ranks - 1) * chunk'},
             {'"broadcast": nbytes': '"broadcast": chunk'}),
        Slip("A broadcast sums nothing. What must leave the root is its tensor, once.",
             {'"broadcast": nbytes': '"broadcast": 2 * (ranks - 1) * chunk'}),
        Slip("The root need not send to every rank itself: another rank can pass the tensor on. At "
             "the least, the tensor leaves the root once.",
             {'"broadcast": nbytes': '"broadcast": (ranks - 1) * nbytes'}),
        Slip("These are the bytes of all ranks together. A link belongs to one rank: take the "
             "busiest one alone.", {'"broadcast": nbytes': '"broadcast": (ranks - 1) * chunk',
                                    "/ seconds": "* ranks / seconds"}),
        Slip("You divided by the factor. The busiest rank sends the factor times the tensor: "
             "multiply.", {"must_send /": "nbytes / (must_send / nbytes) /"}),
        Slip("Each is twice what it should be. A link's bandwidth holds for each direction: count "
             "what a rank sends, and not what it receives.", {"must_send /": "2 * must_send /"}),
        Slip("The number is right in GB/s or GiB/s, and bytes/s are asked.",
             {"/ seconds": "/ seconds / 1e9"}, {"/ seconds": "/ seconds / 2**30"}),
        Slip("You turned bytes into bits, and bytes/s are asked.", {"/ seconds": "/ seconds * 8"}),
    )


def bandwidth_of(case, bandwidth):
    collective, nbytes, ranks, seconds = case
    return {f"the bytes/s of {collective}, {nbytes:,} bytes on {ranks} ranks in {seconds:g} s":
            bandwidth}
