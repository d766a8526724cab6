"""Which units a rank holds whole, seen by what lies in storages."""

import torch

from dplab.measure import Whole, WholeUnits

UNITS = [torch.sin(torch.arange(40.0)), torch.cos(torch.arange(40.0)), torch.arange(7.0)]


def test_a_unit_is_whole_from_its_last_element_until_its_storage_is_freed():
    with WholeUnits(UNITS) as seen:
        flat = torch.zeros(44)  # with padding
        flat[:20] = UNITS[0][:20]
        half = seen.operations
        flat[20:40] = UNITS[0][20:]
        view = flat[:40].view(5, 8)
        for _ in range(6):
            view = view + 0 if False else view.view(8, 5)
        del flat
        seen.mark("a view holds it")
        del view
        torch.zeros(3)
        last = UNITS[2].clone()
        torch.zeros(3)
    assert [span.unit for span in seen.spans] == [0, 2]
    first, other = seen.spans
    assert half < first.start < first.end == seen.marks["a view holds it"]
    assert other.end == seen.operations and len(last) == 7


def test_memory_that_is_written_anew_holds_the_new_unit_and_gradients_are_no_unit():
    with WholeUnits(UNITS[:2]) as seen:
        memory = UNITS[0].clone()
        for _ in range(6):
            memory.view(-1)
        memory.copy_(UNITS[1])
        for _ in range(6):
            memory.view(-1)
        torch.ones(40)
    assert [span.unit for span in seen.spans] == [0, 1]
    assert seen.spans[0].end == seen.spans[1].start
    assert isinstance(seen.spans[0], Whole)
