"""Rows of a comparison as a person writes them: `diloco:period=10,outer_momentum=0.6`, `single:steps=4000`."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atoll.cli.options import Options
from atoll.cli.values import parameters, parse
from atoll.errors import UsageError, suggestion
from atoll.recipes.methods import METHODS
from atoll.train.run import Run

OWN = ("workers", "steps", "accumulate", "batch", "lr", "inner")
"""Common options that a row may have of its own. What is left is the same for all: text, model, seeds."""


@dataclass(frozen=True)
class Row:
    """One line of a comparison: what it is called, and its run with the first seed."""

    label: str
    run: Run


def read(spec: str, own: Collection[str] = ()) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """What METHOD or METHOD:KEY=VALUE,KEY=VALUE says: the method, arguments of its own, and values of common options.

    Args: own: the common options that may be given.
    Raises: UsageError with the nearest name for an unknown method or key.
    """
    name, _, given = spec.partition(":")
    if name not in METHODS:
        raise UsageError(f"the method {name!r} is unknown; {suggestion(name, METHODS)}")
    method_parameters, own_parameters = parameters(METHODS[name]), parameters(Options)
    arguments, changes = dict[str, Any](), dict[str, Any]()
    for pair in given.split(",") if given else []:
        key, equals, word = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise UsageError(f"{spec!r} has {pair!r} where a KEY=VALUE belongs; write {name}:KEY=VALUE,KEY=VALUE")
        if key in method_parameters:
            arguments[key] = parse(f"{name}:{key}", method_parameters[key].annotation, word.strip())
        elif key in own:
            changes[key] = parse(f"{name}:{key}", own_parameters[key].annotation, word.strip())
        else:
            known = [*method_parameters, *own]
            instead = suggestion(key, known) if known else f"it has none, write {name}"
            raise UsageError(f"{spec!r} has the unknown key {key!r}; {instead}")
    return name, arguments, changes


def each_once(specs: Sequence[str]) -> None:
    """Raise a UsageError if one is there twice."""
    for spec in specs:
        if specs.count(spec) > 1:
            raise UsageError(
                f"{spec!r} was given twice; give each method once, or with different options "
                f"({spec.partition(':')[0]}:KEY=VALUE)"
            )


def row(spec: str, options: Options, period: int | None) -> Row:
    """The row of METHOD or METHOD:KEY=VALUE,KEY=VALUE; keys are the method's parameters and those of `OWN`.

    A method that never syncs trains one worker, the fastest one, unless the row says otherwise: k replicas that know
    nothing of each other would be the same baseline at k times the price.

    Args: period: for a method that has one and is not given its own.
    Raises: UsageError with the nearest name for an unknown method or key.
    """
    name, arguments, changes = read(spec, OWN)
    if period and "period" in parameters(METHODS[name]):
        arguments = {"period": period} | arguments
    method = METHODS[name](**arguments)
    if not method.strategy.rules and "workers" not in changes:
        changes |= {"workers": 1, "speeds": None, "loads": None}
    return Row(spec, replace(options, **changes).run(method))


def rows(specs: list[str], options: Options, period: int | None) -> list[Row]:
    """The rows of a comparison.

    Raises: UsageError if there is none, or one twice.
    """
    if not specs:
        raise UsageError(f"atoll compare needs methods to compare; give some of {', '.join(METHODS)}")
    each_once(specs)
    return [row(spec, options, period) for spec in specs]
