"""Files that are whole or not there."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, flush it to the disk, and give it its name: a kill leaves the old or the
    new.

    Raises: whatever `write` raises, and OSError; nothing is left beside then.
    """
    beside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(beside)
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # or a power cut could forget the name
        finally:
            os.close(folder)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that is whole or not there; a number that JSON does not know is an error."""
    write_whole(path, lambda beside: beside.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n"))


def finite(value: Any) -> Any:
    """The same value with None for numbers that JSON does not know (nan, inf).

    Example:
        >>> finite({"loss": [1.0, float("nan")]})
        {'loss': [1.0, None]}
    """
    match value:
        case dict():
            return {name: finite(each) for name, each in value.items()}
        case list() | tuple():
            return [finite(each) for each in value]
        case float() if value != value or abs(value) == float("inf"):
            return None
        case _:
            return value
