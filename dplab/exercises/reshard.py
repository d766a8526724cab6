"""A sharded checkpoint that loads on another number of ranks: each reads what it needs, once."""

import torch

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases, seeded


def load_chunk(read, length, saved_ranks, rank, ranks):
    saved_size = -(-length // saved_ranks)
    size = -(-length // ranks)
    start, end = min(rank * size, length), min((rank + 1) * size, length)
    chunk, filled = torch.zeros(size), 0
    for file in range(saved_ranks):
        first = file * saved_size
        low, high = max(start, first), min(end, first + saved_size)
        if low < high:
            chunk[filled:filled + high - low] = read(file, low - first, high - first)
            filled += high - low
    return chunk


def by_elements(read, length, saved_ranks, rank, ranks):
    """The same, piece by piece from the left."""
    saved_size = (length + saved_ranks - 1) // saved_ranks
    size = (length + ranks - 1) // ranks
    place, end, pieces = rank * size, min((rank + 1) * size, length), []
    while place < end:
        file, inside = divmod(place, saved_size)
        count = min(end - place, saved_size - inside)
        pieces.append(read(file, inside, inside + count))
        place += count
    missing = size - sum(map(len, pieces))
    return torch.cat([*pieces, torch.zeros(missing)])


# Elements, ranks that saved, ranks that load.
CASES = ((24, 4, 4), (24, 4, 2), (24, 2, 4), (23, 4, 3), (23, 3, 4), (7, 2, 5), (10, 4, 1),
         (10, 1, 3), (9, 4, 6))
ONCE = "that is what this rank's chunk has without padding"


class Reshard(Calculation):
    number = "12.2"
    title = "A checkpoint on other ranks"
    minutes = 25
    solution = staticmethod(load_chunk)
    also_right = (by_elements,)

    def trial(self, attempt):
        return of_cases(of_rank, every_rank(), lambda *case: answered(attempt, *case))

    def expected(self, world_size):
        facts = {}
        for case in every_rank():
            inside, chunk, reads = names_of_facts(case)
            right, count = right_chunk(*case)
            facts |= {inside: True, chunk: right, reads: AtMost(count, ONCE)}
        return facts

    hints = (
        "Draw the tensor as a line. The job that saved cut it at multiples of one chunk size, "
        "yours cuts it at multiples of another. Which elements of the line are yours, and in which "
        "files do they lie?",
        "Both chunk sizes are `length` over the ranks, rounded up. For each file, what you need of "
        "it is an overlap of two ranges: from the larger start to the smaller end. It may be "
        "empty. And `read` counts from the start of the *file*.",
        "`start, end = min(rank * size, length), min((rank + 1) * size, length)`: the padding is "
        "not read. With `first = file * saved_size`, `low = max(start, first)` and `high = "
        "min(end, first + saved_size)`, read `low - first` to `high - first` where low < high.",
    )
    slips = (
        Slip("You read a chunk of your size from this rank's file of the job that saved. With "
             "another number of ranks the cuts lie elsewhere: this chunk may lie in several files, "
             "or in a part of one.",
             {"low, high = max(start, first), min(end, first + saved_size)":
              "low, high = (first, first + size) if file == rank else (0, 0)",
              "chunk[filled:filled + high - low] = read(file, low - first, high - first)":
              "got = read(file, 0, size)\nchunk[:len(got)] = got"}),
        Slip("You read a place in the tensor as a place in the file. Each file begins at 0.",
             {"low - first, high - first)": "low, high)"}),
        Slip("Your chunk sizes are rounded down, so that the last elements belong to nobody. The "
             "tensor is padded: round up.",
             {"size = -(-length // ranks)": "size = length // ranks"},
             {"saved_size = -(-length // saved_ranks)": "saved_size = length // saved_ranks"},
             {"size = -(-length // ranks)": "size = length // ranks",
              "saved_size = -(-length // saved_ranks)": "saved_size = length // saved_ranks"}),
        Slip("You read the padding of the other job. Stop at `length`: behind it, your own chunk "
             "has zeros.", {"min((rank + 1) * size, length)": "(rank + 1) * size"}),
        Slip("Your chunk is as long as what was read. Pad it with zeros: all ranks' chunks have "
             "the same length.", {"return chunk": "return chunk[:filled]"}),
        Slip("Each piece lands at the start of your chunk, over the one before.",
             {"chunk[filled:filled + high - low]": "chunk[:high - low]"}),
        Slip("You read whole files and cut what you need out of them. A rank of a large job would "
             "read the whole checkpoint: give `read` the range.",
             {"read(file, low - first, high - first)":
              "read(file, 0, min(saved_size, length - first))[low - first:high - first]"},
             {"read(file, low - first, high - first)":
              "read(file, 0, saved_size)[low - first:high - first]"},
             {"for file in": "whole = torch.cat([read(file, 0, saved_size) for file in "
              "range(saved_ranks)])\nfor file in",
              "read(file, low - first, high - first)": "whole[low:high]"},
             {"for file in": "whole = torch.cat([read(file, 0, min(saved_size, max(0, length - "
              "file * saved_size))) for file in range(saved_ranks)])\nfor file in",
              "read(file, low - first, high - first)": "whole[low:high]"}),
    )


def every_rank():
    return [(length, saved, rank, ranks) for length, saved, ranks in CASES
            for rank in range(ranks)]


def tensor_of(length):
    return seeded(f"a tensor of {length}", length)


def right_chunk(length, saved_ranks, rank, ranks):
    """This rank's chunk, and how many of its elements are no padding."""
    size = -(-length // ranks)
    padded = torch.cat([tensor_of(length), torch.zeros(ranks * size - length)])
    return padded[rank * size:(rank + 1) * size], max(0, min(size, length - rank * size))


def answered(attempt, length, saved_ranks, rank, ranks):
    """Whether all that it reads is there, what the attempt returns, and how much it read."""
    size = -(-length // saved_ranks)
    files = torch.cat([tensor_of(length), torch.zeros(saved_ranks * size - length)]).split(size)
    counts, inside = [0], [True]

    def read(file, start, stop):
        counts.append(max(0, stop - start))
        inside.append(0 <= file < saved_ranks and 0 <= start <= stop <= size)
        return (files[file][start:stop].clone() if inside[-1]
                else torch.full((counts[-1],), torch.nan))

    chunk = attempt(read, length, saved_ranks, rank, ranks)
    return all(inside), chunk, sum(counts)


def names_of_facts(case):
    length, saved_ranks, rank, ranks = case
    of = f"of rank {rank} of {ranks} ({length} elements, saved by {saved_ranks})"
    return (f"that each `read` for the chunk {of} lies in its file", f"the chunk {of}",
            f"the elements that are read for the chunk {of}")


def of_rank(case, answer):
    return dict(zip(names_of_facts(case), answer, strict=True))
