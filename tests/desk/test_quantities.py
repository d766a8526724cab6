"""Numbers as people write them are read, or asked about; never taken for another number."""

import pytest

from dplab.desk.quantities import NotUnderstood, read, written


@pytest.mark.parametrize(("text", "unit", "value"), [
    (" 7. ", None, 7), ("−3", None, -3), ("+2.5", None, 2.5), ("1e-7", None, 1e-7),
    (".5", None, 0.5), ("1.500", None, 1.5), ("~5", None, 5), ("about 5", None, 5),
    ("10 %", "%", 10), ("10percent", "%", 10), ("10", "%", 10), ("0", "%", 0),
    ("3 ms", "ms", 3), ("1 byte", "bytes", 1), ("3 mib", "MiB", 3), ("2 times", "times", 2),
])
def test_a_number_as_people_write_it(text, unit, value):
    assert read(text, unit) == value


@pytest.mark.parametrize(("text", "unit", "offered"), [
    ("1,500", None, ["without commas"]), ("0,1", None, ["0.5"]), ("1 500", None, []),
    ("0.1", "%", ["0.1 %", "10 %"]), ("3 s", "ms", ["in ms"]), ("3 MB", "MiB", ["in MiB"]),
    ("50 %", "times", ["in times"]), ("3 ms", None, ["alone"]), ("3 m", "ms", ["in ms"]),
    ("", None, []), ("ten", "ms", ["3 ms"]), ("10-20", None, []), ("1/8", None, []),
    ("1..2", None, []), ("1_5", None, []), ("1e999", None, []), ("nan", None, []),
])
def test_what_is_not_clear_is_asked_about(text, unit, offered):
    with pytest.raises(NotUnderstood) as asked:
        read(text, unit)
    assert [each for each in offered if each not in str(asked.value)] == []
    assert "?" in str(asked.value) and "\n" not in str(asked.value)


@pytest.mark.parametrize(("value", "unit", "text"), [
    (0, None, "0"), (37.123, "%", "37.1 %"), (0.003, "s", "0.003 s"), (999.6, None, "1,000"),
    (3 * 2 ** 20, "bytes", "3,145,728 bytes"), (1.26e-7, None, "1.26e-07"),
    (float("nan"), "s", "nan s"),
])
def test_a_number_is_written_briefly(value, unit, text):
    assert written(value, unit) == text
