"""Freezes and slow steps of a schedule of faults, on real time: the process sleeps as long as they last."""

import time

from atoll.errors import UsageError
from atoll.faults import Freeze, Slowness
from atoll.train.run import Run


class Waits:
    """What the worker of this process waits for after an inner step. Time counts from the first step's begin.

    Args: run; here: how many workers this process has.
    Raises: UsageError for what no run on real time can do.
    """

    def __init__(self, run: Run, here: int) -> None:
        for event in run.faults.events:
            if not isinstance(event, Freeze | Slowness):
                raise UsageError(
                    f"--faults has {event}, which a run on real time cannot carry out here; leave it out, or give the "
                    "file to atoll simulate"
                )
            if here > 1:
                raise UsageError(
                    f"--faults has {event}, but all workers take turns in one process, so none is slower than "
                    "another; start a process for each with torchrun, or give the file to atoll simulate"
                )
        self._faults = run.faults
        self._zero: float | None = None
        self._since = 0.0

    def begin(self) -> None:
        """An inner step begins."""
        now = time.monotonic()
        self._zero = now if self._zero is None else self._zero
        self._since = now - self._zero

    def carry_out(self, worker: int) -> None:
        """It ends when it would have ended on a worker with these faults."""
        if self._faults.events and self._zero is not None:
            now = time.monotonic() - self._zero
            time.sleep(max(0.0, self._faults.worked(worker, self._since, now - self._since) - now))
