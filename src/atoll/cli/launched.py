"""An island in a process that `atoll launch` started: the command line, which ends when whoever started it is gone."""

import os
import sys
import threading
import time

from atoll.cli import run

LOOK_EVERY = 0.5
"""Seconds between two looks."""


def _ends_with(parent: int) -> None:
    # whatever is on the disk is whole at any moment, so nothing has to be tidied up
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_ends_with, args=(int(sys.argv[1]),), daemon=True).start()
    run(sys.argv[2:])
