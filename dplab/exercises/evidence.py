"""What can be said of a wrong tensor that nobody foresaw: what it is made of.

An exercise may name the ``quantities`` of its data (a wrong factor is often one of them) and the
``parts`` that the ranks contribute to a sum (a wrong sum often lacks one, or has one twice).
"""

import itertools
from dataclasses import replace

import torch

from dplab.exercises.compare import Difference, agree


def explained(difference: Difference, alone, quantities, parts, tolerance) -> Difference:
    """The same difference, and more said of it where more is known.

    alone: the facts that one process would expect of rank 0 alone. quantities: numbers by name.
    parts: by fact, what each rank contributes to the sum.
    """
    notes = [difference.note] if difference.note else []
    if difference.factor is not None and (made := _made_of(difference.factor, quantities)):
        notes[0] += f" ({made})"
    of_one = alone.get(difference.fact)
    if sum_of := _sum_of(difference, parts.get(difference.fact, ()), tolerance):
        notes.append(sum_of)
    elif (difference.factor is None and isinstance(of_one, torch.Tensor)
          and agree(of_one, difference.got, tolerance)
          and not agree(difference.expected, of_one, tolerance)):
        notes.append("it is what rank 0 alone would have")
    return replace(difference, note="; ".join(notes))


def _made_of(factor, quantities):
    """"1 / the micro-batches", if the factor is made of so few numbers; else nothing."""
    named = {1: ["1"]}
    for name, value in quantities.items():
        named.setdefault(value, []).append(name)
    numbers = [(value, " or ".join(names[:2])) for value, names in named.items()]
    ranks = quantities.get("the ranks", 1)
    for more, words in ((1, "{} / {}"), (1 / ranks, "{} / ({} · the ranks)"),
                        (ranks, "the ranks · {} / {}")):
        for (below, divisor), (above, dividend) in itertools.product(numbers, numbers):
            if abs(more * above / below - factor) <= 1e-4 * abs(factor):
                return words.format(dividend, divisor).removesuffix(" / 1")
    return ""


def _sum_of(difference, parts, tolerance):
    """"rank 1's part is missing": how often each rank's part is in the tensor, if that is all."""
    got, right = difference.got, difference.expected
    if not parts or not isinstance(got, torch.Tensor) or got.shape != right.shape:
        return ""
    if words := _times_in(got, parts, tolerance):
        return words
    chunks = [tensor.tensor_split(len(parts)) for tensor in (got, *parts)]
    said = [_times_in(mine, of_ranks, tolerance)
            for mine, *of_ranks in zip(*chunks, strict=True) if len(mine)]
    wrong = [f"in chunk {chunk}, {words}" for chunk, words in enumerate(said) if words != _ONCE]
    return wrong[0] if wrong and all(said) else ""


_ONCE = "each rank's part is in it once"


def _times_in(got, parts, tolerance):
    every = itertools.product((1, 0, 2), repeat=len(parts))
    for times in sorted(every, key=lambda times: sum(number != 1 for number in times)):
        total = sum(number * part for number, part in zip(times, parts, strict=True))
        if agree(total, got, tolerance):
            if sum(times) == 1 and len(times) > 1:
                return f"it holds rank {times.index(1)}'s part alone"
            said = [f"rank {rank}'s part is {'missing' if number == 0 else 'in it twice'}"
                    for rank, number in enumerate(times) if number != 1]
            return " and ".join(said) or _ONCE
    return ""
