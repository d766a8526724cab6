"""When a rank holds a unit's parameters whole, however the code that gathers them is written.

A unit is whole where some storage holds all its parameters, one behind the other. That is seen by
looking into the storages of its size, after each operation of torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

from dplab.measure.storages import Storages, Watch, storages_of

PADDING = 64  # bytes, at most, behind a unit


@dataclass(frozen=True)
class Whole:
    """A unit, by its number, and from which operation of torch to which one it was whole."""

    unit: int
    start: int
    end: int


class WholeUnits(Watch):
    """Follows on this rank, during a ``with`` block, which units are whole.

    ``units``: the flat parameters of each, of one dimension and without padding, as they are
    throughout the block. A storage that holds them may be longer, by PADDING.
    Afterwards: ``spans``, a list of `Whole` in order of their ends, and ``operations``, how many of
    torch the block has run. ``mark(name)`` notes the number of the operation in ``marks``.
    """

    def __init__(self, units: Sequence[torch.Tensor]):
        super().__init__(self._look)
        self.units = [unit.detach().clone() for unit in units]
        self.spans: list[Whole] = []
        self.marks: dict[str, int] = {}
        self.operations = 0
        self._whole: dict[int, tuple[int, int]] = {}  # by storage: its unit, and since when
        self._storages = Storages(self._changed)

    def mark(self, name: str) -> None:
        self.marks[name] = self.operations

    def _look(self, _, inputs, outputs):
        self.operations += 1
        for storage in storages_of(tree_leaves((inputs, outputs))):
            number = self._storages.look_at(storage)
            unit = self._unit_in(storage)
            if number in self._whole and self._whole[number][0] != unit:
                # New memory may still hold what was freed there, until it is written to.
                if self.operations - self._whole[number][1] > 4:
                    self._ended(number)
                self._whole.pop(number, None)
            if unit is not None:
                self._whole.setdefault(number, (unit, self.operations))

    def __exit__(self, *error):
        super().__exit__(*error)
        for number in list(self._whole):
            self._ended(number)
        self._storages.forget()

    def _unit_in(self, storage):
        """The number of the unit whose parameters the storage holds, or None."""
        for index, unit in enumerate(self.units):
            if unit.nbytes <= storage.nbytes() <= unit.nbytes + PADDING:
                held = torch.empty(0, dtype=unit.dtype).set_(storage, 0, unit.shape)
                if torch.equal(held, unit):
                    return index
        return None

    def _changed(self, number, change):
        if change < 0 and number in self._whole:
            self._ended(number)

    def _ended(self, number):
        unit, start = self._whole.pop(number)
        self.spans.append(Whole(unit, start, self.operations))
