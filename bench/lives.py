"""OpenDiLoCo's experiment in small: what do a death and a join cost, in loss and in time, on real text over slow links?

Four islands, each a process with an emulated link (`bench.link`), and a coordinator on a host of its own train the
built-in text by DiLoCo through the wide group and its TLS. Each seed is run twice: undisturbed; and with SIGKILL of one
island at a drawn moment of a round, and some rounds later another process, on another host, which comes under the dead
one's number and has nothing of it but the certificate.

Four islands share this machine's cores. So that it is known how long an inner step takes, each computes its step, and
then sleeps until `step_s` are over; what took longer is counted. The period is the shortest for which the simulator
plans a utilisation of `planned`. Utilisation is what an island's steps should have taken over the time that they took:
from its first step on, a joiner's from its hello, until its last boundary, the dead one's until the last that it told
of; of all islands together. The time in which a place is empty is nobody's.
"""

import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch

from atoll.peers.wide.connect import LEASE_S, connect
from atoll.peers.wide.enrol import enrol
from atoll.peers.wide.home import Home
from atoll.recipes.methods import diloco
from atoll.sim.plan import Setting, used
from atoll.sim.run import spec
from atoll.train.evaluate import held_out_loss
from atoll.train.inner import autocast
from atoll.train.material import Material
from atoll.train.run import Data, Method, Run
from atoll.train.sizes import find_size, parameter_count
from atoll.train.units import UnitShard
from atoll.train.worker import Worker, make_model
from atoll.wire import Landed, Lost
from bench import link
from bench.engines import TIMEOUT_S, address
from bench.engines.atoll import LISTEN
from bench.engines.peer import tuned
from bench.measure import Figure

ISLANDS, VICTIM = 4, 3
COORDINATOR, JOINER = ISLANDS, ISLANDS + 1
"""Hosts beside the islands'."""
GOAL = 0.90


@dataclass(frozen=True)
class Case:
    """What is trained, and on which links.

    Args: planned: utilisation. batch: sequences of `length` bytes. step_s: seconds of an inner step. rounds: of a run.
    """

    access: link.Access = link.Access(100e6, 0.05)
    planned: float = 0.95
    model: str = "small"
    batch: int = 4
    length: int = 64
    step_s: float = 0.3
    rounds: int = 10

    @cached_property
    def period(self) -> int:
        """Inner steps of a round."""
        return next(period for period in itertools.count(1) if self.utilisation(period) >= self.planned)

    def utilisation(self, period: int) -> float:
        """Planned."""
        specs = (spec(parameter_count(find_size(self.model), vocab=256)),)
        setting = Setting(specs, ISLANDS, self.step_s, self.access.bandwidth, self.access.latency)
        return used(_method(period).strategy, period, setting)[0]

    def run(self, seed: int) -> Run:
        """As `atoll join` would train it."""
        data, steps = Data(batch=self.batch, length=self.length), self.rounds * self.period
        return Run(_method(self.period), self.model, data=data, workers=ISLANDS, steps=steps, seed=seed)


CASE = Case()


def _method(period: int) -> Method:
    return diloco(period, outer_momentum=0.5)


@dataclass(frozen=True)
class Told:
    """Of an island, when it takes part, and after each boundary.

    Args: step: done. seconds: since the first of them began. waited: in this boundary, or from hello until it took
    part. peers: of what landed; nobody if a round was lost. slow: steps so far that took longer than they should.
    """

    step: int
    seconds: float
    waited: float
    peers: tuple[int, ...] = ()
    slow: int = 0


@dataclass(frozen=True)
class Ended:
    """Held-out loss of the shared model in nats per byte, and its digest."""

    loss: float
    digest: str


@dataclass
class Life:
    """All that an island told."""

    told: list[Told] = field(default_factory=list[Told])
    ended: Ended | None = None

    @property
    def joined(self) -> bool:
        """Whether others had begun before it."""
        return self.told[0].step > 0

    @property
    def steps(self) -> int:
        """That it took itself."""
        return self.told[-1].step - self.told[0].step

    @property
    def seconds(self) -> float:
        """That it took for them."""
        return self.told[-1].seconds + (self.told[0].waited if self.joined else 0.0)


@dataclass(frozen=True)
class Ran:
    """A run. Args: late: part of the network's packets that were, as the machine was busy."""

    case: Case
    lives: Sequence[Life]
    late: float

    @property
    def utilisation(self) -> float:
        """Of all islands together."""
        return self.case.step_s * sum(life.steps for life in self.lives) / sum(life.seconds for life in self.lives)

    @property
    def slow(self) -> float:
        """Part of the steps that took longer than they should."""
        return sum(life.told[-1].slow for life in self.lives) / sum(life.steps for life in self.lives)

    @property
    def peers(self) -> list[tuple[int, ...]]:
        """Of each round, as the first island saw it."""
        return [told.peers for told in self.lives[0].told[1:]]

    @property
    def loss(self) -> float:
        """Of the shared model. Raises: AssertionError if islands do not end with the same."""
        found = {life.ended.digest: life.ended.loss for life in self.lives if life.ended}
        assert len(found) == 1, f"islands end with {len(found)} digests"
        return next(iter(found.values()))

    def __str__(self) -> str:
        runs = [(len(list(alike)), list(peers)) for peers, alike in itertools.groupby(self.peers)]
        rounds = ", then ".join(f"{count} of {peers}" for count, peers in runs)
        joined = [f"; came in at step {life.told[0].step}" for life in self.lives if life.joined]
        waits = sorted(told.waited for told in self.lives[0].told[1:])
        return (
            f"loss {self.loss:.4f}, {self.utilisation:.3f} in inner steps; rounds: {rounds}{''.join(joined)}; "
            f"boundaries of {waits[0]:.2f} to {waits[-1]:.2f} s, mostly {waits[len(waits) // 2]:.2f}; "
            f"{self.slow:.1%} of steps too long, {self.late:.1%} of packets late"
        )


def figures(seeds: Sequence[int] = (0, 1, 2), case: Case = CASE) -> Iterator[Figure]:
    """Utilisation and loss, undisturbed and not: two minutes for each run."""
    if why := link.missing():
        print(f"lives      skipped: {why}")
        return
    of_time, nats = "of the time in inner steps", "nats per byte"
    yield Figure(f"planned, rounds of {case.period} steps", [case.utilisation(case.period)], of_time)
    found: dict[str, list[Ran]] = {"undisturbed": [], "death and join": []}
    for seed in seeds:
        for (name, runs), moment in zip(found.items(), (None, random.Random(seed).random()), strict=True):
            runs.append(ran(case, seed, moment))
            print(f"lives      seed {seed}, {name}: {runs[-1]}", flush=True)
    for name, runs in found.items():
        yield Figure(f"{name}: measured", [run.utilisation for run in runs], of_time, least=GOAL)
        yield Figure(f"{name}: loss", [run.loss for run in runs], nats)
    whole, cut = found.values()
    apart = [abs(one.loss - other.loss) for one, other in zip(whole, cut, strict=True)]
    spread = stdev(run.loss for run in whole)
    yield Figure("loss apart, same seed", apart, f"{nats}; the spread of undisturbed seeds", most=spread)
    yield Figure("a joiner is in", [life.told[0].waited for run in cut for life in run.lives if life.joined], "s")


def ran(case: Case, seed: int, moment: float | None) -> Ran:
    """One run. Args: moment: part of a round after which an island dies, when a quarter of the rounds have landed;
    another one comes when half of them have. None for neither."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.lives"])
    hosts, traffic = JOINER if moment is None else JOINER + 1, link.Traffic()
    with TemporaryDirectory() as folder, link.network(hosts, case.access, traffic) as door:
        ways, processes = list[Connection](), list[Any]()
        try:
            for host in range(hosts):
                mine, theirs = context.Pipe()
                work, more = (_coordinate, ()) if host == COORDINATOR else (_train, (case, seed))
                arguments = (theirs, door, host, Path(folder), *more)
                processes.append(context.Process(target=work, args=arguments, daemon=True))
                processes[-1].start()
                theirs.close()
                ways.append(mine)
            invitations = [_heard(way) for way in ways][COORDINATOR]
            lives = {host: Life() for host in range(hosts) if host != COORDINATOR}
            for host in range(ISLANDS):
                ways[host].send(invitations[host])
            if moment is not None:
                _follow(ways[0], lives[0], case.rounds // 4)
                time.sleep(moment * case.period * case.step_s)
                os.kill(processes[VICTIM].pid, signal.SIGKILL)
                _follow(ways[0], lives[0], case.rounds // 2)
                ways[JOINER].send(invitations[VICTIM])
            for host, life in lives.items():
                _follow(ways[host], life, case.rounds + 1)
        finally:
            for process in processes:
                process.kill()
                process.join()
    gone = [host for host, life in lives.items() if not life.ended]
    assert gone == ([] if moment is None else [VICTIM]), f"islands {gone} did not come to the end"
    return Ran(case, list(lives.values()), traffic.late / max(1, traffic.delivered))


def _heard(way: Connection) -> Any:
    if not way.poll(TIMEOUT_S):
        raise TimeoutError(f"a host said nothing for {TIMEOUT_S:g} s")
    return way.recv()


def _follow(way: Connection, life: Life, rounds: int) -> None:
    """Until an island has seen so many rounds, or its end."""
    while len(life.told) <= rounds and not life.ended:
        try:
            said = _heard(way)
        except EOFError:
            return
        if isinstance(said, Told):
            life.told.append(said)
        else:
            life.ended = said


def _coordinate(way: Connection, door: str, host: int, folder: Path) -> None:
    """The coordinator's process: gives invitations out, and serves until the bench ends."""
    link.join(door, host)
    tuned()
    home = Home.open(folder / "home", address=address(host))
    with home.serve(ISLANDS, LEASE_S, lambda said: None):
        way.send([invitation.text() for invitation in home.invite(ISLANDS, 3600.0)])
        _end_with(way)


def _end_with(way: Connection) -> None:
    """Wait until the bench is gone, however it ended: its network is gone with it, and no exchange would ever end."""
    with suppress(EOFError, OSError):
        way.recv()
    os._exit(1)


def _train(way: Connection, door: str, host: int, folder: Path, case: Case, seed: int) -> None:
    """An island's process: has its text ready, waits for an invitation, and trains as `atoll join` does."""
    link.join(door, host)
    tuned()
    run, number = case.run(seed), VICTIM if host == JOINER else host
    torch.set_num_threads(run.threads)
    text, credentials = Material.of(run), folder / f"island-{number}"
    way.send("ready")
    invitation, began = way.recv(), time.monotonic()
    threading.Thread(target=_end_with, args=(way,), daemon=True).start()
    enrolled = enrol(invitation, credentials, worker=number)
    with connect(enrolled, credentials, [f"{address(host)}:{LISTEN}"], f"{run!r};{text.fingerprint}") as group:
        units = UnitShard(text.shards, number, run.accumulate, group.units)
        worker = Worker(run, make_model(run, text.vocab, None), units, text.share(number), group)
        state = worker.sync.state
        units.begin(state.step, group.units.first)
        units.tell(state)
        way.send(Told(state.step, 0.0, time.monotonic() - began))
        _step(way, worker, units, case.step_s)
        with worker.sync.lent(state.anchors()) as model:
            loss = held_out_loss(model, text.held_out, autocast(run.precision))
        way.send(Ended(loss, state.digest()))
        group.finish()


def _step(way: Connection, worker: Worker, units: UnitShard, step_s: float) -> None:
    """To the end of the run."""
    began, slow, state = time.monotonic(), 0, worker.sync.state
    while state.step < worker.run.steps:
        until = time.monotonic() + step_s
        tokens = worker.backward()
        worker.update(state.step)
        left = until - time.monotonic()
        slow += left < 0
        time.sleep(max(0.0, left))
        stepped = time.monotonic()
        if state.step + 1 >= state.due:
            units.tell(state)
        events = worker.sync.after_step(tokens)
        units.heard(events, state)
        if events or units.turned:
            units.tell(state)
        for event in events:
            if isinstance(event, Landed | Lost):
                now, peers = time.monotonic(), event.peers if isinstance(event, Landed) else ()
                way.send(Told(state.step, now - began, now - stepped, peers, slow))
