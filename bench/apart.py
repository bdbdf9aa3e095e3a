"""Is an island's engine better off in the process that trains, or in one of its own?

Two islands exchange over zenoh and mutual TLS on emulated links of 1 Gbit/s and 20 ms. One of them trains meanwhile, as
in `bench.beside`: its training thread has a core, and all else has another one. In turns its engine is a thread beside
that one, which shares Python's lock with it, or another process, which shares the memory of what is exchanged. Told are
the steps per second during an exchange, as a part of those without, and how much of the link the exchange uses.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from atoll.train.model import build_model
from bench import link
from bench.beside import VOCAB, missing, on, training
from bench.engines import Seat
from bench.engines.atoll import connect
from bench.engines.peer import tuned
from bench.measure import Figure

ELEMENTS = 25_000_000
ACCESS = link.Access(1e9, 0.02)
ISLANDS = (0, 1)


def figures(elements: int = ELEMENTS, access: link.Access = ACCESS, rounds: int = 8) -> Iterator[Figure]:
    """Both places of the engine: a minute."""
    if why := missing():
        print(f"apart      skipped: {why}")
        return
    cores = sorted(os.sched_getaffinity(0))
    least = 4 * elements * 8 / access.bandwidth
    for where, begin in (("beside", beside), ("apart", apart)):
        found = measured(begin, elements, access, rounds, cores)
        yield Figure(f"engine {where}: steps meanwhile", [kept for kept, _ in found], "of the steps/s without")
        yield Figure(f"engine {where}: the exchange", [least / seconds for _, seconds in found], "of the link")


Begin = Callable[[ExitStack, Connection, str, Tensor], tuple[Callable[[], None], Callable[[], bool]]]
"""Starts island 1's engine: returns what begins an exchange, and whether it is over."""


def beside(
    stack: ExitStack, company: Connection, door: str, own: Tensor
) -> tuple[Callable[[], None], Callable[[], bool]]:
    """In threads of this process."""
    link.join(door, 1)
    tuned()
    ready = stack.enter_context(connect(Seat(1, ISLANDS, own.numel())))
    pool, pending = stack.enter_context(ThreadPoolExecutor(1)), list[Any]()

    def begin() -> None:
        exchange = ready(own)
        company.send("go")
        pending.append(pool.submit(exchange))

    return begin, lambda: pending[-1].done()


def apart(
    stack: ExitStack, company: Connection, door: str, own: Tensor
) -> tuple[Callable[[], None], Callable[[], bool]]:
    """In a process of its own, which holds the same memory."""
    way, theirs = multiprocessing.get_context("spawn").Pipe()
    engine = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, door, 1, own.share_memory_()))
    engine.start()
    stack.callback(engine.join)
    stack.callback(engine.kill)
    way.recv()

    def begin() -> None:
        company.send("go")
        way.send("go")

    def over() -> bool:
        return way.poll() and bool(way.recv())

    return begin, over


def serve(way: Connection, door: str, rank: int, own: Tensor) -> None:
    """An engine: one exchange for each word."""
    link.join(door, rank)
    tuned()
    torch.set_num_threads(1)
    with connect(Seat(rank, ISLANDS, own.numel())) as ready:
        way.send(True)
        while True:
            exchange = ready(own)
            try:
                way.recv()
            except EOFError:
                return
            exchange()
            way.send(True)


def measured(
    begin: Begin, elements: int, access: link.Access, rounds: int, cores: list[int]
) -> list[tuple[float, float]]:
    """Of each round after the first: the part of the steps per second that is left, and the exchange's seconds."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        with on(cores[1]):
            door = stack.enter_context(link.network(2, access))
        company, theirs = context.Pipe()
        way, mine = context.Pipe()
        own = torch.zeros(elements)
        works = (
            context.Process(target=serve, args=(theirs, door, 0, own), daemon=True),
            context.Process(target=train, args=(mine, company, begin, door, elements, rounds, cores)),
        )
        for work in works:
            work.start()
            stack.callback(work.join)
            stack.callback(work.kill)
        mine.close()
        return way.recv()


def train(
    way: Connection,
    company: Connection,
    begin: Begin,
    door: str,
    elements: int,
    rounds: int,
    cores: list[int],
) -> None:
    """The island that trains."""
    os.sched_setaffinity(0, {cores[1]})
    torch.set_num_threads(1)
    found: list[tuple[float, float]] = []
    with ExitStack() as stack:
        launch, over = begin(stack, company, door, torch.zeros(elements))
        company.recv()
        step = training(build_model("tiny", vocab=VOCAB, length=64, seed=0))
        stack.enter_context(on(cores[0]))
        for _ in range(rounds + 1):
            steps, began = 0, time.perf_counter()
            launch()
            while not over():
                step()
                steps += 1
            seconds = time.perf_counter() - began
            company.recv()
            for _ in range(steps):
                step()
            found.append(((time.perf_counter() - began - seconds) / seconds, seconds))
        way.send(found[1:])


if __name__ == "__main__":
    for figure in figures():
        print(f"apart      {figure}", flush=True)
