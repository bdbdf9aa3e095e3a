"""Jobs for other processes: they import nothing heavy, so that starting one is quick."""

import os
import signal
import sys
import time
from pathlib import Path

from atoll.errors import DataError


def square(number: int) -> int:
    return number * number


def process_of(number: int) -> int:
    time.sleep(0.05)
    return os.getpid()


def fails(number: int) -> int:
    if number == 1:
        raise DataError("there is no text")
    time.sleep(60)
    return number


def breaks(number: int) -> int:
    return 1 // number


def dies(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def waits(folder: str, number: int) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(60)


def rank(folder: str, *args: str) -> int:
    """The command line in a process that says its number."""
    from atoll.cli import main

    Path(folder).mkdir(exist_ok=True)
    Path(folder, str(os.getpid())).touch()
    return main(args)


if __name__ == "__main__":
    sys.exit(rank(*sys.argv[1:]))
