"""One process at a time in a directory."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from atoll.errors import UsageError

LOCK = "lock"


@contextmanager
def alone(folder: Path) -> Generator[None]:
    """Be the only island in a directory, as long as the block or this process lasts.

    Raises: UsageError if one runs there already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"an island runs in {folder} already, and two would have the same number; end that one, or give "
                "another --out"
            ) from None
        yield
    finally:
        os.close(file)


def taken(folder: Path) -> bool:
    """Whether an island runs in a directory."""
    if not (folder / LOCK).exists():
        return False
    try:
        with alone(folder):
            return False
    except UsageError:
        return True
