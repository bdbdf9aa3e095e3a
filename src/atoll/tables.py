"""TOML files that a person wrote, read field by field: whatever is wrong is said in a sentence with path and field.

    fields = {"island": WHOLE, "at": SECONDS}
    for table in load(path, {"death"}).tables("death", fields):
        print(table.get("island", WHOLE), table.get("at", SECONDS))

A field that is not known is refused before any is read, so a slip of the pen is not a default.
"""

import json
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from atoll import units
from atoll.errors import UsageError, suggestion

T = TypeVar("T")


@dataclass(frozen=True)
class Field(Generic[T]):
    """How a value of a field is read (its name for messages, and what TOML made of it) and written.

    Args: example: what one looks like in a file.
    """

    read: Callable[[str, Any], T]
    write: Callable[[T], str]
    example: str


def _plain(kinds: tuple[type, ...], what: str, example: str) -> Callable[[str, Any], Any]:
    def read(name: str, value: Any) -> Any:
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise UsageError(f"{name} was {_shown(value)}, but it takes {what}; give one, such as {example}")
        return value

    return read


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _listed(values: Collection[str]) -> str:
    return f"[{', '.join(map(_text, values))}]"


def _words(name: str, value: Any) -> tuple[str, ...]:
    words: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [None]
    if not all(isinstance(word, str) for word in words):
        raise UsageError(f"{name} was {_shown(value)}, but it takes a list of words; give one, such as {WORDS.example}")
    return tuple(words)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


_real = _plain((int, float), "a number", "0.5")


def _number(name: str, value: Any) -> float:
    try:
        return float(_real(name, value))
    except OverflowError:
        digits = len(str(value))
        raise UsageError(f"{name} has {digits} digits, which is more than a number can have; give fewer") from None


WHOLE: Field[int] = Field(_plain((int,), "a whole number", "2"), str, "2")
NUMBER: Field[float] = Field(_number, lambda value: repr(float(value)), "0.5")
WORD: Field[str] = Field(_plain((str,), "a word", '"here"'), _text, '"here"')
WORDS: Field[tuple[str, ...]] = Field(_words, _listed, '["a", "b"]')
SECONDS: Field[float] = Field(units.seconds, lambda value: _text(units.duration(value)), '"30s"')
BANDWIDTH: Field[float] = Field(units.bits_per_second, lambda value: _text(units.bandwidth(value)), '"100Mbit"')


class Table:
    """A table of a file.

    Args: where: path and place, for messages. known: fields that it may have.
    Raises: UsageError for one that it may not have.
    """

    def __init__(self, where: str, values: Mapping[str, Any], known: Collection[str]) -> None:
        self.where, self._values = where, values
        for name in values:
            if name not in known:
                raise UsageError(f"{where}: {name} is not known here; {suggestion(name, known)}")

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, field: Field[T], default: T | None = None) -> T:
        """The value of a field.

        Raises: UsageError if it is not there and has no default, or is of another kind.
        """
        if name in self._values:
            return field.read(f"{self.where}: {name}", self._values[name])
        if default is None:
            raise UsageError(f"{self.where}: {name} is missing; write {name} = {field.example}")
        return default

    def tables(self, name: str, known: Collection[str]) -> Iterator["Table"]:
        """The tables under [[name]], in their order."""
        found: Any = self._values.get(name, [])
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in cast("list[Any]", found)):
            raise UsageError(
                f"{self.where}: {name} was {_shown(found)}, but there may be several; write [[{name}]] above the "
                "fields of each"
            )
        for number, values in enumerate(cast("list[dict[str, Any]]", found), 1):
            yield Table(f"{self.where}, [[{name}]] {number}", values, known)

    def table(self, name: str, known: Collection[str]) -> "Table":
        """The one table under [name], empty if it is not there."""
        found: Any = self._values.get(name, {})
        if not isinstance(found, dict):
            raise UsageError(
                f"{self.where}: {name} was {_shown(found)}, but there is one; write [{name}] above its fields"
            )
        return Table(f"{self.where}, [{name}]", cast("dict[str, Any]", found), known)


def load(path: Path, known: Collection[str]) -> Table:
    """The table that a file is.

    Raises: UsageError if it is missing, cannot be read, is not TOML, or has a field that is not in `known`.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); give a TOML file that is there") from None
    except RecursionError:
        raise UsageError(f"{path} has lists in lists deeper than anyone writes; mend it there") from None
    except ValueError as error:
        raise UsageError(f"{path} is not TOML ({error}); mend it there") from None
    return Table(str(path), values, known)


def block(head: str, fields: Mapping[str, str]) -> str:
    """A table as text, from words that are TOML already; `head` is its line with brackets, or empty.

    Example:
        >>> print(block("[[death]]", {"island": "2", "at": '"120s"'}), end="")
        [[death]]
        island = 2
        at = "120s"
    """
    lines = ([head] if head else []) + [f"{name} = {value}" for name, value in fields.items()]
    return "\n".join(lines) + "\n"
