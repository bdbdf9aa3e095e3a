"""Words that a person typed, as values of a typed signature; whatever is wrong with one is said in a sentence."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from atoll.errors import UsageError, suggestion


@dataclass(frozen=True)
class AtLeast:
    """For `Annotated`: the smallest value that makes sense."""

    bound: float

    def holds(self, value: float) -> bool:
        """Whether `value` is one that makes sense."""
        return value >= self.bound

    def __str__(self) -> str:
        return f"{self.bound:g} or more"


@dataclass(frozen=True)
class Above:
    """For `Annotated`: every value above `bound` makes sense."""

    bound: float

    def holds(self, value: float) -> bool:
        """Whether `value` is one that makes sense."""
        return value > self.bound

    def __str__(self) -> str:
        return f"a number above {self.bound:g}"


Count = Annotated[int, AtLeast(1)]
Positive = Annotated[float, Above(0)]


@dataclass(frozen=True)
class Kind:
    """What a parameter takes: `int`, `float`, `str`, `Path` or `bool`, of which choices and within which bounds.

    Args: optional: it may be None, but nobody can type that.
    """

    base: type
    choices: tuple[str, ...] = ()
    bounds: tuple[AtLeast | Above, ...] = ()
    optional: bool = False

    @property
    def metavar(self) -> str:
        """How help names such a value."""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        return {int: "INT", float: "FLOAT", Path: "PATH", bool: "BOOL"}.get(self.base, "TEXT")


def kind_of(annotation: Any) -> Kind:
    """The kind of an annotation: a plain type, a `Literal` of words, either with bounds (`Annotated`) or with None.

    Example:
        >>> kind_of(Annotated[int, AtLeast(1)] | None)
        Kind(base=<class 'int'>, choices=(), bounds=(AtLeast(bound=1),), optional=True)
    """
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        plain = kind_of(inside[0])
        bounds = tuple(extra for extra in inside[1:] if isinstance(extra, AtLeast | Above))
        return Kind(plain.base, plain.choices, plain.bounds + bounds, plain.optional)
    if origin in (Union, UnionType):
        (only,) = (member for member in inside if member is not NoneType)
        plain = kind_of(only)
        return Kind(plain.base, plain.choices, plain.bounds, optional=True)
    if origin is Literal:
        return Kind(str, inside)
    if annotation in (int, float, str, Path, bool):
        return Kind(annotation)
    raise TypeError(
        f"{annotation!r} cannot be typed on a command line: use int, float, str, Path, bool or a Literal of words"
    )


def parameters(constructor: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function or dataclass by name, annotations resolved."""
    hints = get_type_hints(constructor.__init__ if inspect.isclass(constructor) else constructor, include_extras=True)
    return {
        name: parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(constructor).parameters.items()
    }


def parse(name: str, annotation: Any, word: str) -> Any:
    """The value of a word for a parameter of this annotation, which the person knows as `name`.

    Raises: UsageError if it is none.

    Example:
        >>> parse("--steps", Count, "30")
        30
    """
    kind = kind_of(annotation)
    if kind.choices:
        if word not in kind.choices:
            raise UsageError(f"{name} was {word!r}, which it does not know; {suggestion(word, kind.choices)}")
        return word
    if kind.base is bool:
        return parse(name, Literal["true", "false"], word) == "true"
    try:
        value = kind.base(word)
    except ValueError:
        what = "a whole number" if kind.base is int else "a number"
        raise UsageError(f"{name} was {word!r}, but it takes {what}; give {what}, such as {_example(kind)}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{name} was {word}, but it takes a finite number; give one, such as {_example(kind)}")
    for bound in kind.bounds:
        if not bound.holds(value):
            raise UsageError(f"{name} was {word}, which makes no sense; give {bound}")
    return value


def _example(kind: Kind) -> str:
    return "4" if kind.base is int else "0.5"
