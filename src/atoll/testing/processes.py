"""Run a function in several processes, as the ranks of a launch: for tests of peers."""

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Died:
    """A process that ended without a result, with its exit code (minus the signal's number)."""

    exitcode: int | None


def launch(work: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """What `work(rank, *args)` returns in each of `ranks` processes; `Died` for one that ended in another way.

    Processes are forked from a server that has imported torch once, so they start in milliseconds where the platform
    can fork. They have one intra-op thread each. `work` and its arguments must be importable and picklable.
    Raises: AssertionError with the traceback of the first rank that raised, or if any is still running after `timeout`
    seconds. No process outlives the call, nor the process that made it, however that ends.
    """
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["atoll.peers.torchdist", "atoll.sync.synchronizer"])
    else:
        context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    children = [
        context.Process(target=_run, args=(pipe[1], work, rank, args), daemon=True) for rank, pipe in enumerate(pipes)
    ]
    for child, (_, sender) in zip(children, pipes, strict=True):
        child.start()
        sender.close()
    try:
        return _collected([receiver for receiver, _ in pipes], children, monotonic() + timeout)
    finally:
        for child in children:
            child.kill()
            child.join()


def _collected(receivers: list[Connection], children: Sequence[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        pending = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        ready = wait(pending, timeout=max(0.0, deadline - monotonic()))
        if not ready:
            missing = [rank for rank in range(len(receivers)) if rank not in results]
            raise AssertionError(f"ranks {missing} were still running at the end of their time")
        for rank, receiver in enumerate(receivers):
            if receiver in ready:
                try:
                    results[rank], failure = receiver.recv()
                except EOFError:
                    children[rank].join()
                    results[rank], failure = Died(children[rank].exitcode), None
                if failure:
                    raise AssertionError(f"rank {rank} failed:\n{failure}")
    return [results[rank] for rank in range(len(receivers))]


def _run(sender: Connection, work: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_caller, daemon=True).start()
    try:
        result, failure = work(rank, *args), None
    except BaseException:
        result, failure = None, traceback.format_exc()
    sender.send((result, failure))


def _end_with_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller
    caller.join()
    os._exit(1)


@contextmanager
def gloo(rank: int, ranks: int, meeting: Path, timeout: float = 30.0) -> Generator[None]:
    """The default process group over gloo, met at a file that does not exist yet.

    Args: timeout: seconds.
    """
    init = f"file://{meeting}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    try:
        yield
    finally:
        dist.destroy_process_group()
