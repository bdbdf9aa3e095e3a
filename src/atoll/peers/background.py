"""One thread that does a group's work in order, and answers everyone when it fails."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from atoll.errors import AtollError, GroupError

Result = TypeVar("Result")


class Background:
    """Does jobs one after the other. The first error, or `fail`, answers every job that is not done yet and every
    later one.

    A job runs with the intra-op thread count of the thread that asked for it, because torch keeps one per thread and
    it changes bits. The thread is a daemon: one that hangs in a call that cannot be broken off keeps no process alive.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._error: AtollError | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], Result]) -> "Future[Result]":
        """Do `job` after those before it."""
        answer: Future[Result] = Future()
        threads = torch.get_num_threads()
        with self._lock:
            if self._error:
                raise self._error
            self._open.add(answer)

        def act() -> None:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            result = job()
            with self._lock:
                if answer in self._open:
                    self._open.remove(answer)
                    answer.set_result(result)

        self._jobs.put(act)
        return answer

    def check(self) -> None:
        """Raise the error that ended the thread, if there was one."""
        if self._error:
            raise self._error

    def fail(self, error: AtollError) -> None:
        """Answer everything that is open, and all that comes, with `error`; the first one stays."""
        with self._lock:
            self._error = self._error or error
            for answer in self._open:
                answer.set_exception(self._error)
            self._open.clear()
        self._jobs.put(None)

    def close(self) -> None:
        """Finish what was asked for and end the thread; after a failure wait for it a moment only."""
        self._jobs.put(None)
        self._thread.join(0.5 if self._error else None)

    def _loop(self) -> None:
        while (act := self._jobs.get()) and not self._error:
            try:
                act()
            except AtollError as error:
                self.fail(error)
            except Exception as error:
                wrapped = GroupError(
                    f"an exchange failed with {type(error).__name__}: {error}; the fragment it was writing may be half "
                    "moved, so go on from the last checkpoint"
                )
                wrapped.__cause__ = error
                self.fail(wrapped)
            del act  # what it holds (a fragment's snapshot) must not outlive it while the next is awaited
