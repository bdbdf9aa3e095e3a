"""Flags from typed signatures, by tyro: one flat set for several constructors; a sentence for what cannot be used."""

import io
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from inspect import Parameter, Signature
from itertools import pairwise
from typing import Annotated, Any

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from atoll.cli.values import kind_of, parameters, parse
from atoll.errors import UsageError, suggestion


def parsed(
    prog: str, args: Sequence[str], description: str, words: str | None, **parts: Callable[..., Any]
) -> tuple[dict[str, Any], list[str]]:
    """Call each part with the values of its own flags.

    Args: prog, description: for help. words: what bare words are called where they are allowed. parts: functions or
        dataclasses whose parameters are flags; no two share a name.
    Returns: what the parts returned, by their names, and the bare words.
    Raises: UsageError for an unknown flag or word, or a value that cannot be used. SystemExit after printing help.
    """
    positional = Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar=words or "", help_behavior_hint="")
    ]
    shape = [Parameter("words", Parameter.POSITIONAL_OR_KEYWORD, annotation=positional, default=())] if words else []
    shape += [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=Annotated[Any, tyro.conf.arg(constructor=_typed(part))])
        for name, part in parts.items()
    ]
    known = {
        "--" + name.replace("_", "-"): kind_of(each.annotation)
        for part in parts.values()
        for name, each in parameters(part).items()
    }
    for word, following in pairwise([*args, "--"]):
        kind = known.get(word.replace("_", "-"))
        if kind and kind.base is not bool and following.startswith("--"):
            raise UsageError(f"{word} was given without a value; write {word} {kind.metavar}")
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            values, left = tyro.cli(
                _with_signature(dict, shape),
                prog=prog,
                description=description,
                args=args,
                return_unknown_args=True,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
    except SystemExit as end:
        if end.code:
            raise UsageError(f"{prog} {_sentence(said.getvalue())}") from None
        raise
    for word in left:
        if re.match(r"--?[A-Za-z]", word):
            flag = word.partition("=")[0]
            raise UsageError(f"{prog} has no option {flag}; {suggestion(flag, [*known, '--help'])}")
    found = [*values.pop("words", ()), *left]
    if found and not words:
        raise UsageError(f"{prog} does not know what to do with {found[0]!r}; options begin with --, see {prog} --help")
    return values, found


def _typed(constructor: Callable[..., Any]) -> Callable[..., Any]:
    """The same constructor with a signature whose every value is read by `values.parse`, under the flag's name."""
    return _with_signature(constructor, [_flag(each) for each in parameters(constructor).values()], constructor.__doc__)


def _flag(parameter: Parameter) -> Parameter:
    kind, name = kind_of(parameter.annotation), parameter.name
    if kind.base is bool:
        return parameter.replace(kind=Parameter.KEYWORD_ONLY)
    reader = PrimitiveConstructorSpec[Any](
        nargs=1,
        metavar=kind.metavar,
        instance_from_str=lambda words: parse("--" + name.replace("_", "-"), parameter.annotation, words[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )
    extra = [tyro.conf.arg(help_behavior_hint="")] if parameter.default is None else []
    return parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=Annotated[(Any, reader, *extra)])


def _with_signature(
    constructor: Callable[..., Any], shape: Sequence[Parameter], doc: str | None = None
) -> Callable[..., Any]:
    """A function that calls `constructor` and shows this signature to inspect, and so to tyro."""

    def flags(**values: Any) -> Any:
        return constructor(**values)

    flags.__signature__ = Signature(list(shape))  # pyright: ignore[reportFunctionMemberAccess]
    flags.__annotations__ = {parameter.name: parameter.annotation for parameter in shape}
    flags.__doc__ = doc
    return flags


def _sentence(box: str) -> str:
    """The words of an error that tyro drew in a box (little is left to it: such as a value for a flag that takes
    none)."""
    lines = (re.sub(r"[─━╭╮╰╯│┃]+", " ", line).strip() for line in box.splitlines())
    text = " ".join(" ".join(line for line in lines if line and not line.startswith("For full helptext")).split())
    return "could not read this: " + text.removeprefix("Parsing error").strip()
