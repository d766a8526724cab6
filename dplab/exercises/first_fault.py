"""A base for exercises of which the first wrong fact says most: what follows it follows from it."""

import torch.distributed as dist

from dplab.exercises.compare import COMMUNICATED, first_difference
from dplab.exercises.exercise import Exercise


class FirstFault(Exercise):
    """Where no known mistake ends as the attempt did, one with the same first wrong fact is named.

    So one of two mistakes is found; and what an attempt sends beyond what it needs does not count
    where it is alone, or where the exercise asks for no collective.
    """

    def _facts(self, attempt, *how):
        facts = super()._facts(attempt, *how)
        style = dist.get_world_size() == 1 or not self.communicates
        return {**facts, COMMUNICATED: facts[COMMUNICATED] or style}

    def _alike(self, mistakes, got, expected, world_size):
        alike = super()._alike(mistakes, got, expected, world_size)
        fault = first_difference(expected, got, self.tolerance) if isinstance(got, list) else None
        if fault and not alike:
            until = list(expected[0]).index(fault.fact) + 1
            expected = [dict(list(right.items())[:until]) for right in expected]
            alike = super()._alike(mistakes, got, expected, world_size)
        return alike or self._overlaid(mistakes)

    def _overlaid(self, mistakes):
        """A mistake found already that shows on one rank; on more, another one lies over it."""
        if len(mistakes) == len(self.mistakes) or len({each.why for each in mistakes}) != 1:
            return []
        alone = self._expected(1)
        return [each for each in mistakes
                if first_difference(alone, self._outcome_of(each, 1), self.tolerance)]
