"""Numbers as people write them are read, or asked about; never taken for another number."""

import pytest

from dplab.desk.quantities import NotUnderstood, read, written


@pytest.mark.parametrize(("text", "unit", "value"), [
    ("7", None, 7), (" 7. ", None, 7), ("-3", None, -3), ("−3", None, -3), ("+2.5", None, 2.5),
    ("0.1", None, 0.1), ("0,1", None, 0.1), (".5", None, 0.5), (",5", None, 0.5),
    ("0,125", None, 0.125), ("2,75", None, 2.75), ("1.500", None, 1.5),
    ("1 500", None, 1500), ("1\u202f500", None, 1500), ("1\u00a0500,5", None, 1500.5),
    ("1'500", None, 1500), ("1_500", None, 1500), ("12 345 678", None, 12_345_678),
    ("1,500,000", None, 1_500_000), ("1.500.000", None, 1_500_000),
    ("1,500.5", None, 1500.5), ("1.500,5", None, 1500.5),
    ("1e3", None, 1000), ("2.5E-3", None, 0.0025), ("1e-7", None, 1e-7), ("10^-7", None, 1e-7),
    ("3*10^8", None, 3e8), ("3 × 10^8", None, 3e8), ("2^20", None, 2 ** 20),
    ("2**10", None, 1024),
    ("1/8", None, 0.125), ("3 / 4", None, 0.75),
    ("~5", None, 5), ("≈ 5", None, 5), ("about 5", None, 5), ("ca. 5", None, 5),
    ("3k", None, 3000), ("2 million", None, 2e6),
    ("10 %", "%", 10), ("10%", "%", 10), ("10 percent", "%", 10), ("10", "%", 10), ("0", "%", 0),
    ("0,1 %", "%", 0.1), ("1/8", "%", 12.5), ("1/8 %", "%", 0.125), ("250 %", "%", 250),
    ("3 ms", "ms", 3), ("3ms", "ms", 3), ("3 ms", "s", 0.003), ("0.5 s", "ms", 500),
    ("20 µs", "ms", 0.02), ("20 μs", "ms", 0.02), ("20 us", "ms", 0.02), ("2 min", "s", 120),
    ("1.5 hours", "min", 90), ("1 Second", "s", 1), ("1 500 ms", "s", 1.5),
    ("3 MiB", "bytes", 3 * 2 ** 20), ("3 MB", "bytes", 3e6), ("3 mb", "bytes", 3e6),
    ("3 MiB", "MB", 3 * 2 ** 20 / 1e6), ("64 KB", "kB", 64), ("8 Gbit", "GB", 1),
    ("2^20 bytes", "MiB", 1), ("3 million", "bytes", 3e6), ("1 byte", "bytes", 1),
    ("100 Gbit/s", "GB/s", 12.5), ("100 Gbps", "GB/s", 12.5), ("25 GB/s", "GB/s", 25),
    ("2x", "times", 2), ("2 ×", "times", 2), ("2 times", "times", 2), ("2-fold", "times", 2),
    ("0,5", "times", 0.5),
    ("3 tokens", "tokens", 3), ("3k tokens", "tokens", 3000), ("3K", "tokens", 3000),
    ("1 rank", "ranks", 1),
    ("400", "TFLOP/s", 400), ("400 TFLOP/s", "TFLOP/s", 400),
])
def test_a_number_as_people_write_it(text, unit, value):
    assert read(text, unit) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(("text", "unit", "offered"), [
    ("1,500", None, ["1500", "1.5"]), ("12,000 ms", "ms", ["12000", "12"]),
    ("0.1", "%", ["0.1 %", "10 %"]), ("0,25", "%", ["0.25 %", "25 %"]),
    ("3 Mb", "bytes", ["MB", "Mbit"]), ("100 Gb/s", "GB/s", ["GB/s", "Gbit/s"]),
])
def test_what_has_two_meanings_is_asked_about(text, unit, offered):
    with pytest.raises(NotUnderstood) as asked:
        read(text, unit)
    assert [each for each in offered if each not in str(asked.value)] == []
    assert "?" in str(asked.value) and "\n" not in str(asked.value)


@pytest.mark.parametrize(("text", "unit"), [
    ("", None), ("many", None), ("ten", "ms"), ("10-20", None), ("10 to 20", None), ("1 5", None),
    ("1 500 20", None), ("1,2,3", None), ("1..2", None), ("1_5", None), ("3e", "ms"),
    ("3 m", "s"), ("3 ms", "bytes"), ("3 MB", "ms"), ("50 %", "times"), ("2x", "%"),
    ("3 ms", None), ("3 ranks", "tokens"), ("3 M", "MiB"), ("5 million", "ms"), ("2 times as long",
    "times"), ("1/0", None), ("1e999", None), ("9**999", None), ("(-8)^0.5", None),
    ("-8^0.5", None), ("٣ or so", None), ("nan", None), ("inf", "s"),
])
def test_what_is_not_understood_is_asked_about(text, unit):
    with pytest.raises(NotUnderstood) as asked:
        read(text, unit)
    assert "?" in str(asked.value) and "\n" not in str(asked.value)


@pytest.mark.parametrize(("value", "unit", "text"), [
    (0, None, "0"), (10, "%", "10 %"), (37.123, "%", "37.1 %"), (0.003, "s", "0.003 s"),
    (-2.5, None, "-2.5"), (999.6, None, "1,000"), (3 * 2 ** 20, "bytes", "3,145,728 bytes"),
    (1.26e-7, None, "1.26e-7"), (2e-4, "s", "2e-4 s"), (3e21, None, "3e21"),
    (float("nan"), "s", "nan s"),
])
def test_a_number_is_written_briefly(value, unit, text):
    assert written(value, unit) == text


@pytest.mark.parametrize("unit", [None, "%", "ms", "MiB", "GB/s", "times", "tokens"])
@pytest.mark.parametrize("value", [0.002, 3, 12.5, 640, 1.26e-7, 3e21])
def test_a_number_that_was_written_is_read_again(value, unit):
    assert read(written(value, unit), unit) == pytest.approx(value, rel=1e-12)
