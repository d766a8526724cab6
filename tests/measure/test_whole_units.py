"""Which units a rank holds whole, seen by what lies in storages."""

import torch

from dplab.measure import WholeUnits

UNITS = [torch.sin(torch.arange(40.0)), torch.cos(torch.arange(40.0)), torch.arange(7.0) + 1]


def touched(tensor):
    for _ in range(6):
        tensor.view(-1)


def test_a_unit_is_whole_from_its_last_element_until_nobody_holds_its_storage():
    with WholeUnits(UNITS) as seen:
        memory = torch.arange(44.0)  # with padding
        memory[:20].sin_()
        half = seen.operations
        memory[20:].sin_()
        view = memory.view(4, 11)
        touched(view)
        del memory
        seen.mark("a view holds it")
        touched(view)
        del view
        seen.mark("nobody holds it")
        torch.zeros(3)
    [span] = seen.spans
    assert span.unit == 0 and half < span.start < seen.marks["a view holds it"]
    assert span.end == seen.marks["nobody holds it"] < seen.operations


def test_memory_that_is_written_anew_is_another_unit_and_what_is_left_is_whole_to_the_end():
    with WholeUnits(UNITS) as seen:
        memory = torch.arange(40.0).sin_()
        touched(memory)
        torch.arange(40.0, out=memory)
        memory.cos_()
        touched(memory)
        torch.ones(40)
    assert [span.unit for span in seen.spans] == [0, 1]
    assert seen.spans[0].end < seen.spans[1].start < seen.spans[1].end == seen.operations
