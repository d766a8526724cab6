"""The storages that a rank holds: each with a number, its size as it changes, and what it is."""

import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

CATEGORIES = ("parameters", "optimizer", "gathered", "gradients", "communication", "activations",
              "other")
"""A storage that is several of these at different times is counted as the first of them."""

_ORDER = {category: place for place, category in enumerate(CATEGORIES)}


class Storages:
    """Numbers storages in the order in which they are first seen, and follows each to its end.

    changed: called with a storage's number, and by how many bytes its size has changed; where it
        was first seen, by all of them, and when it is freed, by as many less.
    """

    def __init__(self, changed: Callable[[int, int], None]):
        self._changed = changed
        self._live: dict[int, tuple[int, weakref.ref]] = {}  # by address
        self._categories: list[int] = []
        self.sizes: list[int] = []  # by number

    def known(self, storage: torch.UntypedStorage) -> int | None:
        """Its number, or None for one that was not seen."""
        number, _ = self._live.get(storage._cdata, (None, None))
        return number

    def number(self, storage: torch.UntypedStorage, category: str = "other") -> int:
        """Its number; one that was not seen yet is noted, and is of that category."""
        address = storage._cdata
        if address not in self._live:
            def freed(_):
                self._resize(self._live.pop(address)[0], 0)

            number = len(self.sizes)
            self._live[address] = number, weakref.ref(storage, freed)
            self._categories.append(_ORDER[category])
            self.sizes.append(0)
            self._resize(number, storage.nbytes())
        return self._live[address][0]

    def look_at(self, storage: torch.UntypedStorage) -> int:
        """Its number, after noting the size that it has now."""
        number = self.number(storage)
        self._resize(number, storage.nbytes())
        return number

    def mark(self, storages: Iterable[torch.UntypedStorage], category: str) -> None:
        """Says what they are; of several categories, the first of `CATEGORIES` counts."""
        for storage in storages:
            number = self.number(storage)
            self._categories[number] = min(self._categories[number], _ORDER[category])

    def category(self, number: int) -> str:
        return CATEGORIES[self._categories[number]]

    def forget(self) -> None:
        """Follows no storage any longer."""
        self._live.clear()

    def _resize(self, number, size):
        change, self.sizes[number] = size - self.sizes[number], size
        if change:
            self._changed(number, change)


class Watch(TorchDispatchMode):
    """During a ``with`` block, calls ``ran(operation, inputs, outputs)`` after each of torch's."""

    def __init__(self, ran: Callable):
        super().__init__()
        self._ran = ran

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it takes itself apart, and its local operations come here
        outputs = func(*args, **(kwargs or {}))
        self._ran(func, (args, kwargs), outputs)
        return outputs


def storages_of(values: Iterable) -> Iterator[torch.UntypedStorage]:
    """The storages of this rank's part of each value that is a tensor."""
    for value in values:
        if isinstance(value, DTensor):
            value = value._local_tensor
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            yield value.untyped_storage()
