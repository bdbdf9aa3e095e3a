"""Jobs side by side in processes: a tiny model does not get faster on two cores, but two of them do.

Processes are spawned, kept for the next job (importing torch takes seconds), and never outlive this one: they are ended
when the caller leaves the loop, by an exception or an interrupt too, and end by themselves when their parent is gone.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from atoll.errors import AtollError

LOOK_EVERY = 0.2
"""Seconds between two calls of `meanwhile`."""
PATIENCE = 3.0
"""Seconds that processes get to end by themselves and give back what they share with others; then they are killed."""


def side_by_side(
    function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]], at_once: int, meanwhile: Callable[[], None]
) -> Generator[tuple[int, Any]]:
    """Call `function(*job)` for each job, at most `at_once` at a time; yields (number of the job, result) as they end.

    Args: function: importable by name; jobs: picklable arguments. meanwhile: called several times a second.
    Raises: what the function raised, if that is an `AtollError`; AtollError if a process died or failed otherwise.
        Other jobs are stopped.
    """
    waiting = list(enumerate(jobs))
    helpers: list[_Helper] = []
    try:
        for _ in range(min(at_once, len(waiting))):
            helpers.append(_Helper(function))
            helpers[-1].begin(*waiting.pop(0))
        while busy := [helper for helper in helpers if helper.job is not None]:
            ready = wait([helper.connection for helper in busy], timeout=LOOK_EVERY)
            meanwhile()
            for helper in busy:
                if helper.connection in ready:
                    yield helper.end()
                    if waiting:
                        helper.begin(*waiting.pop(0))
    finally:
        for helper in helpers:
            helper.stop()
        deadline = time.monotonic() + PATIENCE
        for helper in helpers:
            helper.gone(deadline)


class _Helper:
    """One process, and the job it does now."""

    def __init__(self, function: Callable[..., Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.job: int | None = None
        self._process: SpawnProcess = context.Process(target=_serve, args=(function, theirs), daemon=True)
        # Ctrl-C goes to the whole foreground group. Blocked here, it is blocked in the child from its first
        # instruction, so only the parent acts on it; in the parent it is delivered a moment later. The tracker comes
        # first, because starting it unblocks.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()

    def begin(self, number: int, job: tuple[Any, ...]) -> None:
        self.job = number
        try:
            self.connection.send(job)
        except ConnectionError:
            raise self._death() from None

    def end(self) -> tuple[int, Any]:
        number, self.job = self.job, None
        assert number is not None
        try:
            result, error = self.connection.recv()
        except (EOFError, ConnectionError):
            raise self._death() from None
        if error is not None:
            raise error
        return number, result

    def _death(self) -> AtollError:
        self._process.join()
        return AtollError(
            f"the process of a run died (exit status {self._process.exitcode}), as when it is killed or the machine "
            "is out of memory; make room or give fewer --jobs, and start again with --resume"
        )

    def stop(self) -> None:
        self.connection.close()
        if self.job is not None:
            self._process.terminate()

    def gone(self, deadline: float) -> None:
        self._process.join(max(0.0, deadline - time.monotonic()))
        self._process.kill()
        self._process.join()


def _serve(function: Callable[..., Any], connection: Connection) -> None:
    """Do one job after another until the parent closes the connection, or is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            connection.send((function(*job), None))
        except AtollError as error:
            connection.send((None, error))
        except Exception:
            defect = f"a run failed in its process, which is a defect of atoll:\n{traceback.format_exc()}"
            connection.send((None, AtollError(defect)))


def _leave(*_: object) -> None:
    """Unwind, so that what is shared with other processes is given back; what is said on the way helps nobody."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    sys.exit(1)
