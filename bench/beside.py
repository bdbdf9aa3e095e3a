"""Do inner steps keep their speed while an overlapped exchange runs beside them?

Two islands over zenoh and mutual TLS, each on an emulated link of 100 Mbit/s and 50 ms, under eager updates. One of
them trains: forward, backward, clipping and AdamW of a byte-level transformer of 0.13 M parameters. The other one
launches when that one does, and waits. Steps during an exchange are compared with as many after it, before the next
one is launched; `after_step` is called between rounds only, for in between it has nothing to do. Told beside: the same
less the time in which the training thread waited for a core, which on a core to itself only a stranger can take; how
long it neither had a core nor waited for one, but for Python's lock; and what the boundary takes of it, which is in
none of the steps.

The model has 4 M parameters more that no gradient reaches and the optimizer skips, so that an exchange takes more than
a second while a step takes 8 ms: many small operations, at each of which the training thread gives Python's lock away
and may have to wait for it. The steps of larger models would notice less.

First the training thread has a core to itself while all else has another one (its island's other threads, the other
island with the coordinator, and the network), then all have that other one together. Not in turns: a core that has been
idle is slow for a while, and it is steps during an exchange that come first.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from atoll.peers.wide.connect import connect
from atoll.peers.wide.enrol import enrol
from atoll.peers.wide.group import WideGroup
from atoll.peers.wide.home import Home
from atoll.recipes.methods import eager_diloco
from atoll.sync.synchronizer import Synchronizer
from atoll.testing.processes import launch
from atoll.train.model import build_model
from atoll.wire import Launched
from bench import link
from bench.engines import TIMEOUT_S, address
from bench.engines.atoll import LISTEN
from bench.engines.peer import tuned
from bench.measure import Figure

ELEMENTS = 1 << 22
ACCESS = link.Access(100e6, 0.05)
VOCAB, BATCH, LENGTH = 256, 4, 64
GOAL = 0.95


@dataclass(frozen=True)
class Spent:
    """Seconds of the training thread: in all; on a core; waiting for one. What is left it waits for other threads."""

    wall: float
    ran: float
    queued: float

    @staticmethod
    def now() -> "Spent":
        """So far."""
        ran, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return Spent(time.perf_counter(), int(ran) / 1e9, int(queued) / 1e9)

    def since(self, before: "Spent") -> "Spent":
        return Spent(self.wall - before.wall, self.ran - before.ran, self.queued - before.queued)


@dataclass(frozen=True)
class Round:
    """Args: steps: during the exchange, and as many after it. boundary: seconds of the one that launched it."""

    steps: int
    during: Spent
    after: Spent
    boundary: float


def figures(elements: int = ELEMENTS, access: link.Access = ACCESS, rounds: int = 15) -> Iterator[Figure]:
    """What is left of the speed on two cores and on one, and what a boundary takes: two minutes and a half."""
    if why := missing():
        print(f"beside     skipped: {why}")
        return
    cores = sorted(os.sched_getaffinity(0))
    least = 4 * elements * 8 / access.bandwidth
    with ExitStack() as stack:
        with on(cores[1]):
            door = stack.enter_context(link.network(2, access))
        arguments = (multiprocessing.Pipe(), door, elements, rounds, cores)
        found = launch(work, 2, *arguments, timeout=TIMEOUT_S + 20 * rounds * least)[1]
    for where, goal, each in zip(("two cores", "one core"), (GOAL, None), found, strict=True):
        rates = [one.after.wall / one.during.wall for one in each]
        own = [(one.after.wall - one.after.queued) / (one.during.wall - one.during.queued) for one in each]
        stood = [(one.during.wall - one.during.ran - one.during.queued) / one.steps for one in each]
        yield Figure(f"{where}: steps in an exchange", rates, "of the steps/s after it", least=goal)
        yield Figure(f"{where}: less waits for a core", own, "of the same")
        yield Figure(f"{where}: waits for the lock", [1e3 * one for one in stood], "ms of a step in an exchange")
        yield Figure(f"{where}: a step after it", [1e3 * one.after.wall / one.steps for one in each], "ms")
        yield Figure(f"{where}: the exchange", [least / one.during.wall for one in each], "of the link")
        yield Figure(f"{where}: boundary", [1e3 * one.boundary for one in each], "ms of the training thread")


def missing() -> str | None:
    """Why this cannot be measured here, or None."""
    return link.missing() or ("it takes two cores" if len(os.sched_getaffinity(0)) < 2 else None)


@contextmanager
def on(core: int) -> Generator[None]:
    """The calling thread on one core: threads that it starts stay there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def work(
    island: int, ways: tuple[Connection, Connection], door: str, elements: int, rounds: int, cores: Sequence[int]
) -> list[list[Round]]:
    """An island. The first serves the coordinator and keeps the second company, which trains."""
    way = ways[island]
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), {cores[1]})
    link.join(door, island)
    tuned()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        credentials = Path(folder) / "island"
        if island == 0:
            home = Home.open(Path(folder) / "home", address=address(0))
            stack.enter_context(home.serve(2, TIMEOUT_S, lambda said: None))
            mine, theirs = (invitation.text() for invitation in home.invite(2, TIMEOUT_S))
            way.send(theirs)
        else:
            mine = way.recv()
        enrolled = enrol(mine, credentials, worker=island)
        group = stack.enter_context(connect(enrolled, credentials, [f"{address(island)}:{LISTEN}"]))
        model = build_model("tiny", vocab=VOCAB, length=LENGTH, seed=0)
        model.register_parameter("idle", nn.Parameter(torch.zeros(elements)))
        sync = stack.enter_context(Synchronizer(model, eager_diloco(period=1).strategy, group))
        if island == 0:
            for _ in range(2 * (rounds + 1)):
                way.recv()
                sync.after_step(tokens=1)
            return []
        train, found = training(model), list[list[Round]]()
        for core in cores[:2]:
            with on(core):
                # the first warms up
                found.append([_round(sync, group, train, way) for _ in range(rounds + 1)][1:])
        tasks = {int(task) for task in os.listdir("/proc/self/task")} - {os.getpid()}
        assert not any(cores[0] in os.sched_getaffinity(task) for task in tasks), "training was not alone"
        return found


def training(model: nn.Module) -> Callable[[], None]:
    """What makes an inner step, on bytes drawn for it."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        drawn = torch.randint(VOCAB, (BATCH, LENGTH + 1))
        logits = model(input_ids=drawn[:, :-1]).logits
        cross_entropy(logits.flatten(0, 1), drawn[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _round(sync: Synchronizer, group: WideGroup, train: Callable[[], None], way: Connection) -> Round:
    """A boundary, steps until its exchange is over, and as many again."""
    way.send("launch")
    began = time.perf_counter()
    events = sync.after_step(tokens=1)
    key = next(event.key for event in events if isinstance(event, Launched))
    launched, steps = Spent.now(), 0
    while key not in group.member.answers:
        train()
        steps += 1
    over = Spent.now()
    for _ in range(steps):
        train()
    return Round(steps, over.since(launched), Spent.now().since(over), launched.wall - began)


if __name__ == "__main__":
    for figure in figures():
        print(f"beside     {figure}", flush=True)
