"""Faults drawn from a seed, upon islands that train a toy; and what must hold all the same.

    python -m tests.peers.wide.chaos --seeds 0 200

A schedule is a list of faults, each at a phase of a boundary: after so many messages of one kind from one sender have
passed. Serial ones wait until all are back before the next; else a fault follows upon what the one before it set off.

What must hold, of every schedule:
    hangs        all who are alive take part again, and come to the end, within a bound
    bits         where the strategy agrees, whoever has a digest after a step has the same, at any time of its life
    outcomes     of one exchange all have the same: who counts, with which weights, or that it is lost; nobody has it
                 twice; no round is lost of which more than half of the members were alive, where one is gone at a time
    ledger       nobody told the coordinator of another digest than the others
"""

import argparse
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll.errors import GroupError
from atoll.peers.wide import engine, entering, group, member, server
from atoll.peers.wide.ledger import Ledger
from atoll.peers.wide.messages import COORDINATOR
from atoll.peers.wide.server import Server
from atoll.testing.islands import Loopback, Sea
from atoll.testing.toys import Mlp
from atoll.wire import Key, Landed, Lost
from tests.peers.wide.crew import Sailor
from tests.peers.wide.mutations import HEAD
from tests.peers.wide.schedules import METHODS, Fault, Schedule, draw

LEASE_S = 0.8
PATIENCE_S = 0.8
BOUND_S = 30.0
"""Whoever is not back by then hangs: many leases, and what a loaded machine needs."""

_PHASES = ("Contribution", "Mean", "State")


@dataclass
class Outcome:
    """Of a schedule. `wrong`: what did not hold."""

    schedule: Schedule
    deaths: int = 0
    rounds: int = 0
    lost: int = 0
    seconds: float = 0.0
    wrong: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


class Mortal(Ledger):
    """A ledger whose holder can be killed: from then on it neither reads nor writes."""

    dead = False

    def __getattribute__(self, name: str) -> Any:
        if name == "connection" and object.__getattribute__(self, "dead"):
            raise GroupError("killed")
        return super().__getattribute__(name)

    def close(self) -> None:
        """Close the file."""
        self.dead = False
        super().close()


@contextmanager
def hurried() -> Generator[None]:
    """Everything that is measured in seconds goes faster, to fit the lease."""
    changes: list[tuple[Any, str, float]] = [
        (engine, "BEAT_S", 0.1),
        (group, "BEAT_S", 0.1),
        (server, "TICK_S", 0.05),
        (member, "AGAIN_S", 0.25),
        (entering, "AGAIN_S", 0.05),
        (entering, "LATE_S", 1.0),
    ]
    before = [getattr(module, name) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(changes, before, strict=True):
            setattr(module, name, value)


def kind_of(frame: bytes) -> str:
    """What kind of message a frame is."""
    if frame[3]:
        return _PHASES[struct.unpack_from("<B", frame, HEAD + 20)[0]]
    start = HEAD + len('["')
    return frame[start : frame.index(b'"', start)].decode()


class Storm:
    """One schedule, carried out."""

    def __init__(self, schedule: Schedule, folder: Path) -> None:
        self.schedule, self.folder = schedule, folder
        delays = dict(schedule.delays)
        self.sea = Sea(self._passes, (lambda sender, hearer: delays[sender, hearer]) if delays else None)
        self.said: list[str] = []
        self.outcome = Outcome(schedule)
        self.strategy = METHODS[schedule.method]
        self.steps, self.crew, self.sailed = 1_000_000, dict[int, Sailor](), list[Sailor]()
        self._armed: Fault | None = None
        self._count, self._lock, self._struck = 0, threading.RLock(), threading.Event()
        self._serve()
        for worker in range(schedule.workers):
            self._launch(worker)

    def run(self) -> Outcome:
        """Strike, heal, come to the end, and look."""
        began = time.monotonic()
        try:
            if self._calm("the beginning"):
                self._strike()
                if not self.outcome.wrong and self._calm("the end"):
                    self._finish()
            self._check()
        finally:
            self.outcome.seconds = time.monotonic() - began
            for sailor in self.sailed:
                if sailor.thread.is_alive():
                    sailor.kill()
            self.server.close()
            self.sea.passes = lambda sender, hearer, frame: False
            self.sea.end()
        return self.outcome

    # faults

    def _passes(self, sender: int, hearer: int, frame: bytes) -> bool:
        fault = self._armed
        if fault and kind_of(frame) == fault.kind and fault.sender in (None, sender):
            with self._lock:
                self._count += 1
                if self._armed is fault and self._count >= fault.count:
                    self._armed = None
                    # this frame arrives, and nothing after it
                    self._begin(fault)
                    self._struck.set()
        return True

    def _strike(self) -> None:
        healing: list[threading.Timer] = []
        for fault in self.schedule.faults:
            self._count, self._armed = 0, fault
            self._struck.clear()
            if not self._struck.wait(1.0):
                with self._lock:
                    if self._armed:
                        self._armed = None
                        self._begin(fault)
            heal = threading.Timer(min(fault.lasts, 1e6), self._heal, (fault,)) if fault.lasts < 1e6 else None
            if heal:
                heal.start()
                healing.append(heal)
            if self.schedule.serial:
                if heal:
                    heal.join()
                if not self._calm(f"after {fault}"):
                    return
        for heal in healing:
            heal.join()

    def _begin(self, fault: Fault) -> None:
        match fault.what:
            case "kill":
                for worker in fault.who:
                    if sailor := self.crew.pop(worker, None):
                        self.outcome.deaths += 1
                        sailor.kill()
            case "freeze":
                self.sea.freeze(fault.who[0])
                if fault.lasts > LEASE_S:
                    threading.Timer(LEASE_S, self._fade, (fault.who[0],)).start()
            case "cut":
                self.sea.cut(*fault.who)
            case _:
                self.outcome.deaths += 1
                self.ledger.dead = True
                self.sea.sink(COORDINATOR)

    def _fade(self, worker: int) -> None:
        """What a link says of a member that has been silent for a lease."""
        if worker in self.sea.still:
            self.sea.lose(worker)

    def _heal(self, fault: Fault) -> None:
        match fault.what:
            case "kill":
                for worker in fault.who:
                    with self._lock:
                        if worker not in self.crew:
                            self._launch(worker)
            case "freeze":
                self.sea.wake(fault.who[0], drops=fault.drops)
                if fault.lasts > LEASE_S:
                    self.sea.lose(fault.who[0], alive=True)
            case "cut":
                self.sea.mend(*fault.who)
            case _:
                with self._lock:
                    if self.ledger.dead:
                        self.server.close()
                        self._serve()

    def _launch(self, worker: int) -> None:
        sailor = Sailor(self.sea, worker, Mlp(), self.strategy, self.steps, lambda step: 0.005, PATIENCE_S)
        self.crew[worker] = sailor
        self.sailed.append(sailor)

    def _serve(self) -> None:
        self.ledger = Mortal(self.folder / "ledger.sqlite")
        link = Loopback(self.sea, COORDINATOR)
        self.server = Server(link, self.ledger, "run", "1", self.said.append, self.schedule.workers, LEASE_S)

    def _calm(self, when: str) -> bool:
        """Whether all who are alive take part, within the bound."""
        end = time.monotonic() + BOUND_S
        while time.monotonic() < end:
            epoch = self.server.coordinator.epoch
            alive = tuple(sorted(self.crew))
            if any(sailor.error for sailor in self.crew.values()) or self.server.error:
                break
            if epoch and epoch.workers == alive and not epoch.joining and self._all_take_part(epoch.number):
                return True
            time.sleep(0.01)
        self._hang(f"not all are back: {when}")
        return False

    def _all_take_part(self, number: int) -> bool:
        for sailor in self.crew.values():
            if not sailor.sync or not sailor.entered:
                return False
            met = sailor.sync.state.membership
            if met.epoch < number or met.me != sailor.worker:
                return False
        return True

    def _hang(self, why: str) -> None:
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]  # there is no other way to see them
        stacks = [
            "".join(traceback.format_stack(frames[sailor.thread.ident or 0])[-4:])
            for sailor in self.crew.values()
            if sailor.thread.is_alive()
        ]
        errors = [f"worker {s.worker}: {s.error!r}" for s in self.sailed if s.error and not s.killed]
        steps = {worker: sailor.sync.state.step if sailor.sync else None for worker, sailor in self.crew.items()}
        epochs = {w: s.group.member.newest if s.group else None for w, s in self.crew.items()}
        text = f"{why}; epoch {self.server.coordinator.epoch}; steps {steps}; known {epochs}; {errors}\n"
        self.outcome.wrong.append(("hang", text + "\n".join([*self.said[-30:], *stacks])))

    def _finish(self) -> None:
        furthest = max(sailor.sync.state.step for sailor in self.crew.values() if sailor.sync)
        self.steps = furthest + 60
        for sailor in self.crew.values():
            sailor.steps = self.steps
        end = time.monotonic() + BOUND_S
        for sailor in self.crew.values():
            sailor.thread.join(max(0.0, end - time.monotonic()))
        if any(sailor.thread.is_alive() for sailor in self.crew.values()):
            self._hang("not all came to the end")

    # what must hold

    def _check(self) -> None:
        wrong = self.outcome.wrong
        for sailor in self.sailed:
            if sailor.error and not sailor.killed:
                wrong.append(("error", f"worker {sailor.worker}: {sailor.error!r}"))
            if sailor.group and sailor.group.bad:
                wrong.append(("error", f"worker {sailor.worker} got {sailor.group.bad} bad frames"))
        wrong += [("ledger", line) for line in self.said if "do not hold the same" in line]
        if self.strategy.agrees:
            wrong += [("bits", line) for line in self._different()]
        wrong += [("outcomes", line) for line in self._outcomes()]

    def _different(self) -> Iterator[str]:
        seen: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for index, sailor in enumerate(self.sailed):
            for entry, step, digest in list(sailor.history):
                seen[step][digest].append(f"{sailor.worker} (life {index}, entry {entry})")
        for step, digests in sorted(seen.items()):
            if len(digests) > 1:
                yield f"step {step}: {dict(digests)}"
                return

    def _outcomes(self) -> Iterator[str]:
        told: dict[Key, list[tuple[int, Landed | Lost]]] = defaultdict(list)
        for sailor in self.sailed:
            ended: Counter[Key] = Counter()
            for _, event in list(sailor.log):
                if isinstance(event, Landed | Lost):
                    ended[event.key] += 1
                    told[event.key].append((sailor.worker, event))
            if twice := [key for key, times in ended.items() if times > 1]:
                yield f"worker {sailor.worker} has {twice[0]} twice"
        self.outcome.rounds = len(told)
        for key, events in told.items():
            lost = [(worker, event) for worker, event in events if isinstance(event, Lost)]
            landed = [(worker, event) for worker, event in events if isinstance(event, Landed)]
            self.outcome.lost += bool(lost)
            for _, event in lost:
                if (short := _short(event)) and self.schedule.workers >= 4 and self._single():
                    yield f"{key} is lost, though {short}: {event.why}"
            if self.strategy.agrees:
                forms = {(event.peers, event.weights, event.dropped, event.norms) for _, event in landed}
                if len(forms) > 1 or (lost and landed):
                    yield f"{key} came to {forms} and {[event.why for _, event in lost]}"
                continue
            ways = dict(events)
            for worker, event in landed:
                for peer in event.peers:
                    other = ways.get(peer)
                    if other and not (isinstance(other, Landed) and other.peers == event.peers):
                        yield f"{key}: worker {worker} met {event.peers}, but worker {peer} had {other}"

    def _single(self) -> bool:
        return self.schedule.serial and self.schedule.method != "noloco"


def _short(lost: Lost) -> str | None:
    """Why a round should not have been lost."""
    words = lost.why.split()
    if len(words) > 2 and words[1] == "of" and words[0].isdigit():
        return None if 2 * int(words[0]) <= int(words[2]) else f"{words[0]} of {words[2]} are more than half"
    return "its members were there"


def weather(seed: int, method: str | None = None) -> Outcome:
    """Carry out the schedule of a seed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, hurried():
        return Storm(draw(seed, method), Path(folder)).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 50), metavar=("FIRST", "LAST"))
    parser.add_argument("--method", choices=[*METHODS])
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args()
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for seed in range(*asked.seeds):
        outcome = weather(seed, asked.method)
        row = rows[outcome.schedule.method]
        row.update(schedules=1, deaths=outcome.deaths, rounds=outcome.rounds, lost=outcome.lost)
        row.update(kind for kind, _ in outcome.wrong)
        if asked.verbose or outcome.wrong:
            print(f"seed {seed}  {outcome.seconds:.1f} s  {replace(outcome.schedule, delays=())}", flush=True)
        for kind, text in outcome.wrong:
            print(f"    {kind}: {text}", flush=True)
    columns = ("schedules", "deaths", "rounds", "lost", "hang", "bits", "outcomes", "ledger", "error")
    print(f"{'method':10}" + "".join(f"{column:>10}" for column in columns))
    for method, row in sorted(rows.items()):
        print(f"{method:10}" + "".join(f"{row[column]:>10}" for column in columns))
    sys.exit(any(row[column] for row in rows.values() for column in columns[4:]))


if __name__ == "__main__":
    main()
