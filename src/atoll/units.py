"""Quantities that a person wrote with their unit, such as 100Mbit and 1.5min, and how to write them."""

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction

from atoll.errors import UsageError, suggestion

UNITS: Mapping[str, Fraction] = {
    f"{prefix}{unit}{per}": Fraction(scale * bits)
    for prefix, scale in (("", 1), ("k", 10**3), ("M", 10**6), ("G", 10**9), ("T", 10**12))
    for unit, bits in (("bit", 1), ("B", 8))
    for per in ("", "/s")
}
"""Bits per second of each unit of bandwidth, decimal as links are sold."""

DURATIONS: Mapping[str, Fraction] = {
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "day": Fraction(86400),
    "days": Fraction(86400),
}
"""Seconds of each unit of time."""


def bits_per_second(name: str, word: object) -> float:
    """A bandwidth such as 100Mbit, 1.5Gbit/s or 12MB, in bits per second: the float nearest to what is written.

    Args: name: what the person knows it as. word: what they wrote, a number being one without its unit.
    Raises: UsageError without a number or unit, or if nothing would ever move.

    Example:
        >>> bits_per_second("--bandwidth", "100Mbit"), bits_per_second("--bandwidth", "12.5MB/s")
        (100000000.0, 100000000.0)
    """
    found = _quantity(name, word, UNITS, "100Mbit", "{0}Mbit for megabits or {0}MB for megabytes per second".format)
    if not found > 0:
        raise UsageError(f"{name} was {found:g}, which makes no sense; give a number above 0")
    return found


def seconds(name: str, word: object) -> float:
    """A duration such as 50ms, 2s, 1.5min, 3h or 2days, in seconds: the float nearest to what is written.

    Args: name: what the person knows it as. word: what they wrote, a number being one without its unit.
    Raises: UsageError without a number or unit. Whether one below 0 makes sense is for the caller to say.

    Example:
        >>> seconds("at", "50ms"), seconds("at", "1.5min")
        (0.05, 90.0)
    """
    return _quantity(name, word, DURATIONS, "30s", "{0}s".format)


def bandwidth(bits: float) -> str:
    """The word for finite bits per second, exactly.

    Example:
        >>> bandwidth(1.5e9), bandwidth(250.0)
        ('1.5Gbit', '250bit')
    """
    exponent, prefix = next(
        (each for each in ((12, "T"), (9, "G"), (6, "M"), (3, "k")) if bits >= 10 ** each[0]), (0, "")
    )
    return f"{_decimal(bits, -exponent)}{prefix}bit"


def duration(seconds: float) -> str:
    """The word for finite seconds, exactly.

    Example:
        >>> duration(90.0), duration(0.05)
        ('90s', '50ms')
    """
    return f"{_decimal(seconds, 3)}ms" if 0 < seconds < 1 else f"{_decimal(seconds)}s"


def _decimal(value: float, exponent: int = 0) -> str:
    """`value 10^exponent` without an exponent of its own, in the fewest digits that give back the same float."""
    return f"{Decimal(repr(float(value))).scaleb(exponent).normalize():f}"


def _quantity(
    name: str, word: object, units: Mapping[str, Fraction], example: str, with_unit: Callable[[str], str]
) -> float:
    text = word.strip() if isinstance(word, str) else str(word)
    unit = text.lstrip("+-.0123456789")
    number, unit = text[: len(text) - len(unit)], unit.strip()
    if (number and not unit) or _finite(word):
        raise UsageError(f"{name} was {word!r}, which has no unit; write {with_unit(text)}")
    try:
        value = Fraction(number if isinstance(word, str) else "")
        if unit in units:
            return float(value * units[unit])
    except (ValueError, OverflowError):
        raise UsageError(
            f"{name} was {word!r}, but it takes a number with a unit; give one, such as {example}"
        ) from None
    raise UsageError(f"{name} was {word!r}, whose unit {unit!r} is unknown; {suggestion(unit, units)}")


def _finite(word: object) -> bool:
    """Whether it is a number already, and one that a unit would make a quantity."""
    return isinstance(word, int | float) and not isinstance(word, bool) and math.isfinite(word)
