"""Islands and a coordinator in processes of their own, over zenoh and TLS, that real signals are sent to.

    python -m tests.peers.wide.fleet --seeds 0 20

Faults at drawn moments: SIGKILL of an island, which is started again; SIGSTOP for longer than the lease, then SIGCONT;
SIGKILL of the coordinator, which is started again from its ledger; an island that comes later; one that is killed while
it comes. What must hold: nobody hangs; all who end have the same digest; whoever has a digest after a step has the
same; and no round is lost of which a majority was there.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atoll.cli.wide import free_port
from atoll.errors import LeftBehind
from atoll.parts.outers import nesterov
from atoll.parts.schedules import every
from atoll.peers.wide.connect import connect
from atoll.peers.wide.enrol import enrol
from atoll.peers.wide.home import Home
from atoll.sync.rule import Rule, Strategy
from atoll.sync.synchronizer import Synchronizer
from atoll.testing.toys import Mlp, adamw, backward, move
from atoll.wire import Landed, Lost

STRATEGY = Strategy((Rule(every(5), outer=nesterov(0.7, 0.9)),))
LEASE_S = 2.0
STEP_S = 0.02
BOUND_S = 60.0
"""An island that has not ended by then hangs."""


def keep(folder: Path, islands: int) -> None:
    """The coordinator's process."""
    home = Home.open(folder)
    with home.serve(islands, LEASE_S, lambda said: None) as server:
        server.wait()


def train(folder: Path, invitation: str, worker: int, steps: int) -> None:
    """An island's process: one line of JSON for each step and event."""
    torch.set_num_threads(1)
    credentials = folder / f"worker-{worker}"
    enrolled = enrol(invitation, credentials, worker=worker)
    listen = [f"127.0.0.1:{free_port()}"]
    with (
        (folder / f"log-{worker}.jsonl").open("a", buffering=1) as log,
        connect(enrolled, credentials, listen, lease=LEASE_S) as group,
    ):

        def note(**record: Any) -> None:
            log.write(json.dumps(record) + "\n")

        model = Mlp()
        sync = Synchronizer(model, STRATEGY, group)
        optimizer, state = adamw(model.parameters()), sync.state
        note(entered=state.step)
        while state.step < steps:
            step = state.step + 1
            time.sleep(STEP_S)
            backward(model, 0, worker, step)
            move(model.parameters(), optimizer)
            try:
                events = sync.after_step(tokens=8)
            except LeftBehind:
                sync.come_again()
                optimizer = adamw(model.parameters())
                note(entered=state.step)
                continue
            for event in events:
                if isinstance(event, Landed):
                    note(step=step, landed=event.key.round, peers=event.peers)
                elif isinstance(event, Lost):
                    note(step=step, lost=event.key.round, why=event.why)
            note(step=step, digest=state.digest())
        note(ended=state.digest())
        group.finish()


@dataclass
class Fleet:
    """All processes of one run in a folder."""

    folder: Path
    workers: int
    steps: int = 400
    processes: dict[int, Any] = field(default_factory=dict[int, Any])
    keeper: Any = None
    stopped: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["atoll.peers.wide.connect", "atoll.peers.wide.home", "atoll.testing.toys"]
        )
        self._home = Home.open(self.folder / "home", address="127.0.0.1", port=free_port(2))
        self._invitations = [each.text() for each in self._home.invite(self.workers, 3600.0)]
        self.coordinate()

    def coordinate(self) -> None:
        self.keeper = self._context.Process(target=keep, args=(self.folder / "home", self.workers), daemon=True)
        self.keeper.start()
        end = time.monotonic() + BOUND_S
        while time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._home.port + 1), 1.0):
                return
            time.sleep(0.05)

    def start(self, worker: int) -> None:
        work = (self.folder, self._invitations[worker], worker, self.steps)
        self.processes[worker] = self._context.Process(target=train, args=work, daemon=True)
        self.processes[worker].start()

    def signal(self, worker: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.processes[worker].pid, number)
        if number is signal.SIGKILL:
            self.processes[worker].join()

    def records(self, worker: int) -> list[dict[str, Any]]:
        path = self.folder / f"log-{worker}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def step(self, worker: int) -> int:
        return max((record["step"] for record in self.records(worker) if "step" in record), default=0)

    def wait(self, worker: int, step: int, seconds: float = BOUND_S) -> None:
        """Until an island has come to a step."""
        end = time.monotonic() + seconds
        while self.step(worker) < step:
            assert time.monotonic() < end, f"worker {worker} stands at step {self.step(worker)}, short of {step}"
            time.sleep(0.02)

    def close(self) -> None:
        for process in [*self.processes.values(), self.keeper]:
            process.kill()
            process.join()

    def check(self) -> dict[str, int]:
        """What must hold once all have ended. Returns: counts."""
        end, counts = time.monotonic() + BOUND_S, {"landed": 0, "lost": 0, "entered": 0}
        for worker, process in self.processes.items():
            process.join(max(0.0, end - time.monotonic()))
            assert process.exitcode is not None, f"worker {worker} hangs at step {self.step(worker)}"
            assert process.exitcode == 0, f"worker {worker} ended with {process.exitcode}"
        digests: dict[int, set[str]] = {}
        ended: set[str] = set()
        for worker in self.processes:
            for record in self.records(worker):
                if "digest" in record:
                    digests.setdefault(record["step"], set()).add(record["digest"])
                ended |= {record["ended"]} if "ended" in record else set()
                for name in counts:
                    counts[name] += name in record
        assert len(ended) == 1, f"islands end with {len(ended)} digests"
        assert all(len(found) == 1 for found in digests.values()), "islands differ after a step"
        return counts


def schedule(seed: int, folder: Path, workers: int = 4) -> dict[str, int]:
    """Run one drawn schedule; worker 0 is never hit, so somebody always knows the state."""
    rng = random.Random(seed)
    with closing(Fleet(folder, workers)) as fleet:
        late = rng.random() < 0.3
        for worker in range(workers - late):
            fleet.start(worker)
        if late:
            # the run begins with all: the last one is killed at once, and comes again
            fleet.start(workers - 1)
        fleet.wait(0, 6)
        for _ in range(rng.choice([1, 2, 2])):
            time.sleep(rng.random() * 0.6)
            victim, what = rng.randrange(1, workers), rng.choice(["kill", "kill", "stop", "coordinator", "twice"])
            if what == "coordinator":
                fleet.keeper.kill()
                fleet.keeper.join()
                time.sleep(rng.random() * 1.5)
                fleet.coordinate()
                continue
            fleet.signal(victim, signal.SIGSTOP if what == "stop" else signal.SIGKILL)
            if what == "stop":
                time.sleep(rng.choice([0.5, LEASE_S + 1.0]))
                fleet.signal(victim, signal.SIGCONT)
                continue
            time.sleep(rng.random())
            fleet.start(victim)
            if what == "twice":  # while it comes
                time.sleep(0.3 + rng.random() * 0.7)
                fleet.signal(victim, signal.SIGKILL)
                fleet.start(victim)
        return fleet.check()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 20))
    asked, failed = parser.parse_args(), 0
    for seed in range(*asked.seeds):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = schedule(seed, Path(folder))
            except AssertionError as error:
                failed, said = failed + 1, f"FAILED: {error}"
                with suppress(OSError):
                    print((Path(folder) / "home" / "log.txt").read_text())
        print(f"seed {seed}  {time.monotonic() - began:.1f} s  {said}", flush=True)
    print(f"{failed} of {asked.seeds[1] - asked.seeds[0]} schedules failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
