"""Exercise 3.8: the bus bandwidth of a measured time."""

from dplab.checks.exercise import Calculation, Mistake
from dplab.checks.trials import of_cases
from dplab.exercises.ring_seconds import _as_float


def bus_bandwidth(collective, nbytes, ranks, seconds):
    # What the busiest rank has to send, in units of the whole tensor.
    must_send = {"all_reduce": 2 * (ranks - 1) / ranks,  # N−1 chunks in each of two halves
                 "reduce_scatter": (ranks - 1) / ranks,
                 "all_gather": (ranks - 1) / ranks,
                 "broadcast": 1}[collective]  # the root's tensor has to leave the root
    return must_send * nbytes / seconds


def algorithm_bandwidth(collective, nbytes, ranks, seconds):
    return nbytes / seconds


def all_reduce_always(collective, nbytes, ranks, seconds):
    return bus_bandwidth("all_reduce", nbytes, ranks, seconds)


def one_half_for_all_reduce(collective, nbytes, ranks, seconds):
    if collective == "all_reduce":
        collective = "reduce_scatter"
    return bus_bandwidth(collective, nbytes, ranks, seconds)


def one_chunk_for_all_gather(collective, nbytes, ranks, seconds):
    whole = nbytes * ranks if collective == "all_gather" else nbytes
    return bus_bandwidth(collective, whole, ranks, seconds)


def one_chunk_for_both_halves(collective, nbytes, ranks, seconds):
    whole = nbytes * ranks if collective in ("all_gather", "reduce_scatter") else nbytes
    return bus_bandwidth(collective, whole, ranks, seconds)


def one_chunk_for_reduce_scatter(collective, nbytes, ranks, seconds):
    whole = nbytes * ranks if collective == "reduce_scatter" else nbytes
    return bus_bandwidth(collective, whole, ranks, seconds)


def whole_tensors_in_each_step(collective, nbytes, ranks, seconds):
    whole = nbytes if collective == "broadcast" else nbytes * ranks
    return bus_bandwidth(collective, whole, ranks, seconds)


def whole_tensors_in_an_all_reduce(collective, nbytes, ranks, seconds):
    whole = nbytes * ranks if collective == "all_reduce" else nbytes
    return bus_bandwidth(collective, whole, ranks, seconds)


def one_chunk_only(collective, nbytes, ranks, seconds):
    if collective in ("all_gather", "reduce_scatter"):
        return nbytes / ranks / seconds
    return bus_bandwidth(collective, nbytes, ranks, seconds)


def broadcast_in_chunks(collective, nbytes, ranks, seconds):
    if collective == "broadcast":
        collective = "all_gather"
    return bus_bandwidth(collective, nbytes, ranks, seconds)


def broadcast_of_one_chunk(collective, nbytes, ranks, seconds):
    if collective == "broadcast":
        return nbytes / ranks / seconds
    return bus_bandwidth(collective, nbytes, ranks, seconds)


def broadcast_as_two_halves(collective, nbytes, ranks, seconds):
    if collective == "broadcast":
        collective = "all_reduce"
    return bus_bandwidth(collective, nbytes, ranks, seconds)


def broadcast_to_each_rank(collective, nbytes, ranks, seconds):
    if collective == "broadcast":
        return (ranks - 1) * nbytes / seconds
    return bus_bandwidth(collective, nbytes, ranks, seconds)


def bytes_of_all_ranks(collective, nbytes, ranks, seconds):
    if collective == "broadcast":
        return (ranks - 1) * nbytes / seconds
    return ranks * bus_bandwidth(collective, nbytes, ranks, seconds)


def a_chunk_too_many(collective, nbytes, ranks, seconds):
    chunks = {"all_reduce": 2 * ranks, "reduce_scatter": ranks, "all_gather": ranks,
              "broadcast": ranks}[collective]
    return chunks / ranks * nbytes / seconds


def the_factor_upside_down(collective, nbytes, ranks, seconds):
    return (nbytes / seconds) ** 2 / bus_bandwidth(collective, nbytes, ranks, seconds)


def sent_and_received(collective, nbytes, ranks, seconds):
    return 2 * bus_bandwidth(collective, nbytes, ranks, seconds)


def in_gigabytes(collective, nbytes, ranks, seconds):
    return bus_bandwidth(collective, nbytes, ranks, seconds) / 1e9


def in_bits(collective, nbytes, ranks, seconds):
    return 8 * bus_bandwidth(collective, nbytes, ranks, seconds)


class BusBandwidth(Calculation):
    number = "3.8"
    title = "The bus bandwidth of a measured time"
    minutes = 6
    hints = (
        "How many bytes must the busiest rank send, at the least, in each of the four? You have "
        "counted two halves and a whole. Who is the busiest in a broadcast?",
        "A half of the ring sends N-1 chunks of nbytes/N from each rank, an all-reduce twice as "
        "much. In a broadcast, every byte has to leave the root once.",
        "`factor * nbytes / seconds`, where the factor is 2(N-1)/N for an all-reduce, (N-1)/N for "
        "each half, and 1 for a broadcast.",
    )
    solution = staticmethod(bus_bandwidth)
    mistakes = (
        Mistake(algorithm_bandwidth, "This is the algorithm bandwidth, the tensor over the time. "
                "Count what the busiest rank has to send for it instead."),
        Mistake(all_reduce_always, "You count an all-reduce each time. A reduce-scatter and an "
                "all-gather are half of one, and a broadcast only brings one tensor out."),
        Mistake(one_half_for_all_reduce, "An all-reduce is a reduce-scatter and then an "
                "all-gather: the busiest rank sends twice as much as in one half."),
        *(Mistake(attempt, "`nbytes` is the whole tensor here, all N chunks together. You took it "
                  "for one rank's chunk.")
          for attempt in (one_chunk_for_all_gather, one_chunk_for_reduce_scatter,
                          one_chunk_for_both_halves)),
        *(Mistake(attempt, "You let a rank send the whole tensor in each step. It "
                  "sends one chunk in each step, an N-th of nbytes.")
          for attempt in (whole_tensors_in_each_step, whole_tensors_in_an_all_reduce)),
        Mistake(one_chunk_only, "A rank sends more than its own chunk in a half of the ring: one "
                "chunk in each of N-1 steps."),
        *(Mistake(attempt, "In a broadcast only the root has the tensor, so every byte of it must "
                  "leave the root: nbytes, and not a part of it.")
          for attempt in (broadcast_in_chunks, broadcast_of_one_chunk)),
        Mistake(broadcast_as_two_halves, "A broadcast sums nothing. What must leave the root is "
                "its tensor, once."),
        Mistake(broadcast_to_each_rank, "The root need not send to every rank itself: another rank "
                "can pass the tensor on. At the least, the tensor leaves the root once."),
        Mistake(bytes_of_all_ranks, "You counted the bytes of all ranks together. A link belongs "
                "to one rank: take the busiest one alone."),
        Mistake(a_chunk_too_many, "Each half of the ring has N-1 steps, not N: nobody sends to "
                "itself."),
        Mistake(the_factor_upside_down, "You divided by the factor. The busiest rank sends the "
                "factor times the tensor: multiply."),
        Mistake(sent_and_received, "You count what a rank sends and what it receives. A link's "
                "bandwidth holds for each direction: count what is sent."),
        Mistake(in_gigabytes, "The number is right in GB/s, and bytes/s are asked."),
        Mistake(in_bits, "You turned bytes into bits, and bytes/s are asked."),
    )
    CASES = tuple((collective, nbytes, ranks, seconds)
                  for collective in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
                  for nbytes, ranks, seconds in ((2**33, 8, 0.05), (3_000_000, 3, 2e-3)))

    def trial(self, attempt):
        return of_cases(_bus_facts, self.CASES, attempt)

    def expected(self, world_size):
        return of_cases(_bus_facts, self.CASES, bus_bandwidth)


def _bus_facts(case, bandwidth):
    collective, nbytes, ranks, seconds = case
    return {f"the bytes/s of {collective}, {nbytes:,} bytes on {ranks} ranks in {seconds:g} s":
            _as_float(bandwidth)}
