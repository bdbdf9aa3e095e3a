"""What commands have in common: the method or the directory that they are given, where results go, interrupts."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, TextIO

from atoll.cli.values import parameters
from atoll.errors import UsageError, suggestion

if TYPE_CHECKING:
    from atoll.train.run import Method


def folder_and(
    command: str, word: str, about: str, args: list[str], **parts: Callable[..., Any]
) -> tuple[Path, dict[str, Any]]:
    """The one directory that a command takes, and its options."""
    from atoll.cli.flags import parsed

    values, words = parsed(f"atoll {command}", args, about, word, **parts)
    if len(words) != 1:
        given = f"was given {len(words)}" if words else "needs one"
        raise UsageError(f"atoll {command} takes one {word}, a directory, and {given}")
    return Path(words[0]), values


def method_and(command: str, args: list[str], **parts: Callable[..., Any]) -> tuple["Method", dict[str, Any]]:
    """The method that the first word names, made with its own options, and the parts made with the rest."""
    from atoll.cli.flags import parsed
    from atoll.recipes.methods import METHODS

    match args:
        case ["-h" | "--help", *_]:
            print(f"usage: atoll {command} METHOD [OPTIONS]\n")
            width = max(map(len, METHODS)) + 1
            for name, function in METHODS.items():
                indent = f"  {name:{width}}"
                print(fill(_about(function), 118, initial_indent=indent, subsequent_indent=" " * len(indent)))
            print(f"\n  atoll {command} METHOD --help   its options")
            raise SystemExit(0)
        case [name, *rest] if name in METHODS:
            for word in rest:
                _refuse_anothers(name, word.partition("=")[0])
            prog, description = f"atoll {command} {name}", f"{command.capitalize()} {name}."
            values, _ = parsed(prog, rest, description, None, method=METHODS[name], **parts)
            return values.pop("method"), values
        case [name, *_] if not name.startswith("-"):
            raise UsageError(f"atoll {command} does not know the method {name!r}; {suggestion(name, METHODS)}")
        case _:
            raise UsageError(f"atoll {command} needs a method before its options; give one of {', '.join(METHODS)}")


def _about(function: Callable[..., Any]) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((function.__doc__ or "").partition("\n\n")[0].split())


def _refuse_anothers(name: str, flag: str) -> None:
    """Say whose option this is, if it is other methods' and not this one's."""
    from atoll.recipes.methods import METHODS

    key = flag.removeprefix("--").replace("-", "_")
    owners = [method for method, function in METHODS.items() if key in parameters(function)]
    if flag.startswith("--") and owners and name not in owners:
        raise UsageError(f"{name} has no option {flag}, which belongs to {', '.join(owners)}; leave it out")


def launched() -> bool:
    """Whether torchrun started this process; these names are its protocol."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def results_on(json: bool) -> Generator[TextIO]:
    """The real stdout; with JSON, whatever anyone prints meanwhile goes to stderr."""
    stdout = sys.stdout
    if json:
        with redirect_stdout(sys.stderr):
            yield stdout
    else:
        yield stdout


@contextmanager
def resumable(out: Path | None) -> Generator[None]:
    """Let an interrupt say how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if not out:
            how = "nothing was kept; give --out DIR to be able to resume"
        elif out.exists():
            how = f"the same command with --out {out} --resume goes on from the last complete checkpoint"
        else:
            how = f"nothing was in {out} yet"
        raise KeyboardInterrupt(f"interrupted; {how}") from None


@contextmanager
def terminable() -> Generator[None]:
    """End on SIGTERM, which schedulers and containers send, as on an interrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
