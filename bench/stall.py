"""How long do survivors stand when an island dies in the middle of an exchange?

Four peers exchange 25 MB over an emulated link of 100 Mbit/s and 50 ms (`bench.link`). At a drawn moment of a warm
exchange one of them gets a signal. The stall is the time from the signal until the last survivor has its result, less
what an undisturbed exchange still needed then. After SIGKILL what the dead one had to sum is sent again; after SIGSTOP
nothing is known before the lease is over.
"""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench import link
from bench.engines import Seat
from bench.measure import Figure

PEERS, VICTIM = 4, 3
ELEMENTS = 6_553_600
ACCESS = link.Access(100e6, 0.05)
WARM = 2
LEASE_S = 5.0
GOAL_S = 1.0


def figures(turns: int = 10, elements: int = ELEMENTS, access: link.Access = ACCESS) -> Iterator[Figure]:
    """Stalls after SIGKILL, and after SIGSTOP: a quarter of an hour."""
    if why := link.missing():
        print(f"stall      skipped: {why}")
        return
    for number, most in ((signal.SIGKILL, GOAL_S), (signal.SIGSTOP, LEASE_S + GOAL_S)):
        found, undisturbed = list[float](), list[float]()
        for turn in range(turns):
            needed, moment, seconds = stalled(number, random.Random(turn).random(), elements, access)
            undisturbed.append(needed)
            found.append(seconds - (needed - moment))
            print(f"stall      {number.name} at {moment:.2f} of {needed:.2f} s: {found[-1]:.2f} s", flush=True)
        yield Figure(f"exchange before {number.name}", undisturbed, "s")
        yield Figure(f"stall after {number.name}", found, "s", most=most)


def stalled(number: signal.Signals, part: float, elements: int, access: link.Access) -> tuple[float, float, float]:
    """Seconds of an undisturbed exchange; of the next one, until the signal; and from then until survivors had it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.engines.atoll"])
    with link.network(PEERS, access) as door:
        ways, peers = list[Connection](), list[Any]()
        for rank in range(PEERS):
            mine, theirs = context.Pipe()
            peers.append(context.Process(target=_exchange, args=(theirs, door, rank, elements), daemon=True))
            peers[-1].start()
            theirs.close()
            ways.append(mine)
        try:
            for _ in range(1 + WARM):
                told = _round(ways)
            needed = max(ended for _, ended in told) - min(began for began, _ in told)
            for way in ways:
                way.send("exchange")
            began, moment = time.monotonic(), part * needed
            time.sleep(moment)
            os.kill(peers[VICTIM].pid, number)
            told = [way.recv() for rank, way in enumerate(ways) if rank != VICTIM]
            return needed, moment, max(ended for _, ended in told) - (began + moment)
        finally:
            for peer in peers:
                peer.kill()
                peer.join()


def _round(ways: list[Connection]) -> list[tuple[float, float]]:
    for way in ways:
        way.send("exchange")
    return [way.recv() for way in ways]


def _exchange(way: Connection, door: str, rank: int, elements: int) -> None:
    """One peer: exchanges whenever it is told to; says when it began and ended."""
    link.join(door, rank)
    from bench.engines import atoll
    from bench.engines.peer import tuned

    tuned()
    torch.set_num_threads(1)
    seat = Seat(rank, tuple(range(PEERS)), elements)
    own = torch.empty(elements)
    with atoll.connect(seat, lease=LEASE_S) as ready:
        while True:
            exchange = ready(own.fill_(rank))
            try:
                way.recv()
            except EOFError:
                return
            began = time.monotonic()
            exchange()
            way.send((began, time.monotonic()))


if __name__ == "__main__":
    for figure in figures():
        print(f"stall      {figure}", flush=True)
