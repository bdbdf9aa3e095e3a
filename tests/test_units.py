"""Quantities are the floats nearest to what is written, and what has no unit is refused in a sentence."""

from collections.abc import Callable
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.units import bandwidth, bits_per_second, duration, seconds


@pytest.mark.parametrize(
    ("word", "bits"),
    [
        ("100Mbit", 1e8),
        ("100Mbit/s", 1e8),
        ("1.5Gbit", 1.5e9),
        ("12MB", 9.6e7),
        ("56kbit", 56e3),
        ("1000bit/s", 1e3),
        ("1TB/s", 8e12),
        ("10 Mbit", 1e7),
    ],
)
def test_bandwidth_is_read_in_decimal_units(word: str, bits: float) -> None:
    assert bits_per_second("--bandwidth", word) == bits


@pytest.mark.parametrize("word", ["100", "100Mb", "Mbit", "-5Mbit", "0Mbit", "1.2.3Mbit", "", "100mbit"])
def test_bandwidth_without_a_number_or_a_known_unit_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="--bandwidth was"):
        bits_per_second("--bandwidth", word)


@pytest.mark.parametrize(
    ("word", "want"),
    [
        ("50ms", 0.05),
        ("29ms", 0.029),
        ("100us", 1e-4),
        ("2s", 2.0),
        ("1.5min", 90.0),
        ("3h", 10800.0),
        ("1day", 86400.0),
        ("2days", 172800.0),
        ("0s", 0.0),
        ("-5 s", -5.0),
    ],
)
def test_durations_are_the_nearest_floats(word: str, want: float) -> None:
    assert seconds("at", word) == want


@pytest.mark.parametrize(
    ("read", "word", "sentence"),
    [
        (seconds, 120, "at was 120, which has no unit; write 120s"),
        (seconds, 1.5, "at was 1.5, which has no unit; write 1.5s"),
        (seconds, "120", "at was '120', which has no unit; write 120s"),
        (seconds, "5sec", "at was '5sec', whose unit 'sec' is unknown; did you mean s?"),
        (seconds, "5q", "at was '5q', whose unit 'q' is unknown; give one of us, ms, s, min, h, day, days"),
        (seconds, "soon", "at was 'soon', but it takes a number with a unit; give one, such as 30s"),
        (seconds, "1.2.3s", "at was '1.2.3s', but it takes a number with a unit; give one, such as 30s"),
        (seconds, "9" * 400 + "s", f"at was '{'9' * 400}s', but it takes a number with a unit; give one, such as 30s"),
        (seconds, float("inf"), "at was inf, but it takes a number with a unit; give one, such as 30s"),
        (seconds, True, "at was True, but it takes a number with a unit; give one, such as 30s"),
        (seconds, ["5s"], "at was ['5s'], but it takes a number with a unit; give one, such as 30s"),
        (
            bits_per_second,
            100,
            "at was 100, which has no unit; write 100Mbit for megabits or 100MB for megabytes per second",
        ),
        (bits_per_second, "100Mbot", "at was '100Mbot', whose unit 'Mbot' is unknown; did you mean Mbit?"),
        (bits_per_second, "0Mbit", "at was 0, which makes no sense; give a number above 0"),
        (bits_per_second, "Mbit", "at was 'Mbit', but it takes a number with a unit; give one, such as 100Mbit"),
    ],
)
def test_what_is_no_quantity_is_refused_with_field_value_and_what_to_write(
    read: Callable[[str, object], float], word: object, sentence: str
) -> None:
    with pytest.raises(UsageError) as refused:
        read("at", word)
    assert str(refused.value) == sentence


@given(st.floats(0, allow_infinity=False))
def test_what_is_written_is_read_back_exactly(value: float) -> None:
    assert seconds("at", duration(value)) == value
    if value:
        assert bits_per_second("up", bandwidth(value)) == value


@given(st.decimals(0, 10**6, places=4), st.sampled_from([("ms", "0.001"), ("s", "1"), ("min", "60"), ("h", "3600")]))
def test_a_duration_is_rounded_once(number: Decimal, unit: tuple[str, str]) -> None:
    assert seconds("at", f"{number:f}{unit[0]}") == float(number * Decimal(unit[1]))
