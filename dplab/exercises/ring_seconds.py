"""Exercise 3.5: the seconds of a ring."""

import math

from dplab.checks.exercise import Calculation, Mistake
from dplab.checks.trials import of_cases


def ring_seconds(nbytes, ranks, bandwidth, latency):
    """How long a ring all-reduce takes: 2(N-1) messages, one after another, of 1/N of the bytes."""
    return 2 * (ranks - 1) * (latency + nbytes / ranks / bandwidth)


def seconds_of_one_half(nbytes, ranks, bandwidth, latency):
    return (ranks - 1) * (latency + nbytes / ranks / bandwidth)


def seconds_of_whole_tensors(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * (latency + nbytes / bandwidth)


def latency_once(nbytes, ranks, bandwidth, latency):
    return latency + 2 * (ranks - 1) / ranks * nbytes / bandwidth


def latency_left_out(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) / ranks * nbytes / bandwidth


def one_chunk_in_all(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * latency + nbytes / ranks / bandwidth


def a_step_too_many(nbytes, ranks, bandwidth, latency):
    return 2 * ranks * (latency + nbytes / ranks / bandwidth)


def bytes_of_many_ranks(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * latency + 2 * nbytes / bandwidth


def bytes_of_the_tensor(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * latency + nbytes / bandwidth


def all_ranks_one_after_another(nbytes, ranks, bandwidth, latency):
    return ranks * 2 * (ranks - 1) * (latency + nbytes / ranks / bandwidth)


def steps_of_a_tree(nbytes, ranks, bandwidth, latency):
    return 2 * math.log2(ranks) * (latency + nbytes / ranks / bandwidth)


def times_bandwidth(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * (latency + nbytes / ranks * bandwidth)


def bits_for_bytes(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * (latency + 8 * nbytes / ranks / bandwidth)


def both_ways_at_once(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * (latency + nbytes / ranks / (2 * bandwidth))


def bytes_of_both_halves_twice(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * (latency + 2 * nbytes / ranks / bandwidth)


class RingSeconds(Calculation):
    number = "3.5"
    title = "The seconds of a ring"
    minutes = 5
    hints = (
        "How many messages does a rank send, each of which waits for the one before it? How many "
        "bytes does each of them carry?",
        "Every rank sends in every step, at the same time. So the time of the ring is that of one "
        "rank's messages, one after the other.",
        "There are 2(N-1) messages of nbytes/N each. A message takes the latency, and its bytes "
        "over the bandwidth.",
    )
    solution = staticmethod(ring_seconds)
    mistakes = (
        Mistake(seconds_of_one_half, "This is one half of the ring. An all-reduce is a "
                "reduce-scatter and then an all-gather: twice as many messages and bytes."),
        Mistake(seconds_of_whole_tensors, "Here each message takes as long as the whole tensor. It "
                "carries one chunk, an N-th of the bytes."),
        Mistake(latency_once, "The latency counts once for each message that waits for the one "
                "before it. Count the steps of both halves."),
        Mistake(latency_left_out, "The latency is missing; small tensors have little else."),
        Mistake(one_chunk_in_all, "Every message carries a chunk: mind the brackets, both terms "
                "are multiplied by the number of messages."),
        Mistake(a_step_too_many, "Each half of the ring has N-1 steps, not N: nobody sends to "
                "itself."),
        Mistake(bytes_of_many_ranks, "A rank sends less than twice the tensor. It comes near to "
                "that with many ranks; count the chunks."),
        Mistake(bytes_of_the_tensor, "A rank sends more than its tensor once. Count the chunks of "
                "both halves."),
        Mistake(all_ranks_one_after_another, "You counted the messages of all ranks one after "
                "another. In each step all ranks send at the same time, each on its own link."),
        Mistake(steps_of_a_tree, "The logarithm belongs to a tree. On a ring, a chunk makes one "
                "hop in each step, past every rank."),
        Mistake(times_bandwidth, "You multiplied by the bandwidth. Bytes over bytes per second "
                "are seconds."),
        Mistake(bits_for_bytes, "You turned bytes into bits. The bandwidth is in bytes per second "
                "here."),
        Mistake(bytes_of_both_halves_twice, "The factor 2 for both halves is in the bytes twice. "
                "There are 2(N-1) messages already; each carries one chunk."),
        Mistake(both_ways_at_once, "You doubled the bandwidth. It is given for each direction, and "
                "a rank sends in one while it receives in the other."),
    )
    CASES = ((28_000_000_000, 8, 50e9, 14e-6), (4000, 1024, 450e9, 3.4e-6),
             (50_000_000, 3, 12.5e9, 14e-6), (1000, 1, 1e9, 1e-6))

    def trial(self, attempt):
        return of_cases(_seconds_facts, self.CASES, attempt)

    def expected(self, world_size):
        return of_cases(_seconds_facts, self.CASES, ring_seconds)


def _seconds_facts(case, seconds):
    nbytes, ranks, bandwidth, latency = case
    return {f"the seconds of {nbytes:g} bytes on {ranks} ranks, {bandwidth:g} bytes/s and "
            f"{latency:g} s": _as_float(seconds)}


def _as_float(value):
    """A whole number as a float, so that 0 and 0.0 are the same answer."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
