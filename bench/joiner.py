"""How long does a joiner take to come in, and what do the others notice?

Three islands train a model of 50 MB (its state, anchor and momentum, is 100 MB) over emulated links of 100 Mbit/s and
50 ms; inner steps are timed waits. A fourth, whose process has started, says hello. It is in when its `Synchronizer`
returns: it has fetched the state and knows the step from which it takes part. The least that takes is its state over
its own link.
"""

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from bench import link
from bench.measure import Figure

ISLANDS = 3
ELEMENTS = 12_500_000
ACCESS = link.Access(100e6, 0.05)
STEP_S, PERIOD = 0.1, 200
GOAL, RATE = 1.3, 0.9


def figures(turns: int = 3, elements: int = ELEMENTS, access: link.Access = ACCESS) -> Iterator[Figure]:
    """Seconds against the least, and the others' steps: a minute for each turn."""
    if why := link.missing():
        print(f"joiner     skipped: {why}")
        return
    least = 2 * 4 * elements * 8 / access.bandwidth
    taken, rates = list[float](), list[float]()
    for _ in range(turns):
        seconds, rate = joined(elements, access)
        taken.append(seconds / least)
        rates.append(rate)
    yield Figure("a joiner is in", taken, f"of its state over its link ({least:.3g} s)", most=GOAL)
    yield Figure("the others' steps meanwhile", rates, "of those before", least=RATE)


def joined(elements: int, access: link.Access) -> tuple[float, float]:
    """Seconds until a joiner is in; the others' steps per second meanwhile, as a part of those before."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.engines.atoll", "atoll.recipes.methods"])
    with TemporaryDirectory() as folder, link.network(ISLANDS + 1, access) as door:
        ways, islands = list[Connection](), list[Any]()
        for rank in range(ISLANDS + 1):
            mine, theirs = context.Pipe()
            work = (theirs, door, rank, elements, Path(folder))
            islands.append(context.Process(target=_train, args=work, daemon=True))
            islands[-1].start()
            theirs.close()
            ways.append(mine)
        try:
            for way in ways[:ISLANDS]:
                way.send("go")
            assert ways[0].recv() == "a round has landed"
            before = ways[0].recv()
            ways[ISLANDS].send("go")
            seconds = ways[ISLANDS].recv()
            ways[0].send("how fast?")
            return seconds, ways[0].recv() / before
        finally:
            for island in islands:
                island.kill()
                island.join()


def _train(way: Connection, door: str, rank: int, elements: int, folder: Path) -> None:
    """One island. The first tells how fast it steps: once alone, and over all of the time that the joiner took."""
    link.join(door, rank)
    from atoll.peers.wide.connect import connect
    from atoll.peers.wide.enrol import enrol
    from atoll.peers.wide.home import Home
    from atoll.recipes.methods import diloco
    from atoll.sync.synchronizer import Synchronizer
    from atoll.wire import Landed
    from bench.engines import address
    from bench.engines.atoll import LISTEN
    from bench.engines.peer import tuned

    tuned()
    torch.set_num_threads(1)
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.zeros(elements)))
    serving = None
    if rank == 0:
        home = Home.open(folder / "home", address=address(0))
        serving = home.serve(ISLANDS, 10.0, lambda said: None)
        serving.__enter__()
        for each, invitation in enumerate(home.invite(ISLANDS + 1, 3600.0)):
            (folder / f"{each}.new").write_text(invitation.text())
            (folder / f"{each}.new").rename(folder / f"{each}.txt")
    while not (folder / f"{rank}.txt").exists():
        time.sleep(0.05)
    enrolled = enrol((folder / f"{rank}.txt").read_text(), folder / f"island-{rank}", worker=rank)
    way.recv()
    began = time.monotonic()
    with (
        connect(enrolled, folder / f"island-{rank}", [f"{address(rank)}:{LISTEN}"]) as group,
        Synchronizer(model, diloco(PERIOD).strategy, group) as sync,
    ):
        if rank == ISLANDS:
            way.send(time.monotonic() - began)
            way.recv()
        steps, since, landed = 0, time.monotonic(), False
        while True:
            time.sleep(STEP_S)
            events = sync.after_step(tokens=1)
            steps += 1
            if rank == 0 and not landed and any(isinstance(event, Landed) for event in events):
                landed, steps, since = True, 0, time.monotonic()
                way.send("a round has landed")
            elif rank == 0 and landed and steps == 5:
                way.send(steps / (time.monotonic() - since))
            elif rank == 0 and way.poll():
                way.recv()
                way.send(steps / (time.monotonic() - since))


if __name__ == "__main__":
    for figure in figures():
        print(f"joiner     {figure}", flush=True)
