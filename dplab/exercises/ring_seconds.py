"""How long a ring all-reduce takes, by its messages and their bytes."""

import math

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def ring_seconds(nbytes, ranks, bandwidth, latency):
    messages = 2 * (ranks - 1)  # of each rank, one after another
    chunk = nbytes / ranks
    return messages * (latency + chunk / bandwidth)


# nbytes, ranks, bandwidth, latency
CASES = ((28_000_000_000, 8, 50e9, 14e-6), (4000, 1024, 450e9, 3.4e-6),
         (50_000_000, 3, 12.5e9, 14e-6), (7_000_000, 5, 1e9, 1e-3), (60_000, 2, 2e8, 4e-4),
         (900_000, 12, 3e9, 5e-5), (1000, 1, 1e9, 1e-6))


class RingSeconds(Calculation):
    number = "3.4"
    title = "The seconds of a ring"
    minutes = 5
    solution = staticmethod(ring_seconds)

    def trial(self, attempt):
        return of_cases(seconds_of, CASES, attempt)

    def expected(self, world_size):
        return of_cases(seconds_of, CASES, ring_seconds)

    def terms(self):
        cases = {}
        for case in CASES:
            nbytes, ranks, bandwidth, latency = case
            chunk = nbytes / ranks / bandwidth
            sizes = {"the latency of one message": latency, "the bytes of one chunk": chunk,
                     "the bytes of the whole tensor": ranks * chunk,
                     "the bytes of N−1 whole tensors": (ranks - 1) * ranks * chunk,
                     "the bytes of N whole tensors": ranks**2 * chunk}
            for number, count in (("log₂N", math.log2(ranks)), ("N−1", ranks - 1)):
                sizes |= {f"the latency of {number} messages": count * latency,
                          f"the bytes of {number} chunks": count * chunk}
            sizes |= {"the latency of N messages": ranks * latency,
                      "the latency of N(N−1) messages": ranks * (ranks - 1) * latency}
            if ranks > 1:  # with one, nearly all of them are 0
                cases |= {fact: sizes for fact in seconds_of(case, None)}
        return {"": cases}

    hints = (
        "How many messages does a rank send, each of which waits for the one before it? How many "
        "bytes does each of them carry?",
        "Every rank sends in every step, at the same time. So the time of the ring is that of one "
        "rank's messages, one after the other.",
        "There are 2(N-1) messages of nbytes/N each. A message takes the latency, and its bytes "
        "over the bandwidth.",
    )
    slips = (
        Slip("This is one half of the ring. An all-reduce is a reduce-scatter and then an "
             "all-gather: twice as many messages and bytes.", {"2 * (ranks - 1)": "ranks - 1"}),
        Slip("Each half of the ring has N-1 steps, not N: nobody sends to itself.",
             {"ranks - 1": "ranks"}, {"2 * (ranks - 1)": "2 * ranks - 1"}),
        Slip("The logarithm belongs to a tree. On a ring, a chunk makes one hop in each step, past "
             "every rank.", {"(ranks - 1)": "math.log2(ranks)"}),
        Slip("Here each message takes as long as the whole tensor. It carries one chunk, an N-th "
             "of the bytes.", {"nbytes / ranks": "nbytes"}),
        Slip("The latency is missing; small tensors have little else.",
             {"latency + chunk": "chunk"}),
        Slip("The latency counts once for each message that waits for the one before it. Count the "
             "steps of both halves.",
             {"messages * (latency + chunk": "latency + messages * (chunk"},
             {"latency + chunk": "latency / 2 + chunk"}),
        Slip("Each message has the whole latency, however few bytes it carries. Only the bytes are "
             "divided by N.", {"latency + chunk": "latency / ranks + chunk"}),
        Slip("Every message carries a chunk: mind the brackets, both terms are multiplied by the "
             "number of messages.",
             {"(latency + chunk / bandwidth)": "latency + chunk / bandwidth"}),
        Slip("A rank sends less than twice the tensor. It comes near to that with many ranks; "
             "count the chunks.",
             {"(latency + chunk / bandwidth)": "latency + 2 * nbytes / bandwidth"}),
        Slip("A rank sends more than its tensor once. Count the chunks of both halves.",
             {"(latency + chunk / bandwidth)": "latency + nbytes / bandwidth"}),
        Slip("You counted the messages of all ranks one after another. In each step all ranks send "
             "at the same time; only the messages of one rank wait for one another.",
             {"return": "return ranks *"}),
        Slip("You multiplied by the bandwidth. Bytes over bytes per second are seconds.",
             {"/ bandwidth": "* bandwidth"}),
        Slip("You turned bytes into bits. The bandwidth is in bytes per second here.",
             {"chunk / b": "8 * chunk / b"}),
        Slip("The bytes take half as long as they should. Both halves of the ring carry a chunk in "
             "each step; and the bandwidth is that of each direction: a rank sends in one while it "
             "receives in the other, which does not double it.", {"chunk / b": "chunk / 2 / b"}),
        Slip("The bytes take twice as long as they should. There are 2(N-1) messages already, each "
             "with one chunk; and a rank sends while it receives.", {"chunk / b": "2 * chunk / b"}),
    )


def seconds_of(case, seconds):
    nbytes, ranks, bandwidth, latency = case
    return {f"the seconds of {nbytes:g} bytes on {ranks} ranks, {bandwidth:g} bytes/s and "
            f"{latency:g} s": seconds}
