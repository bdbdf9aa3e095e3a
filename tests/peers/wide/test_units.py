"""The account of units against a plain world: who trains what, who dies, what of it landed with whom."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.peers.wide.account import Account, Lease
from atoll.peers.wide.ledger import Ledger
from atoll.peers.wide.messages import Message, read, write
from atoll.peers.wide.units import LEASE, Units

Unit = tuple[int, int]
PERIOD = 6


@dataclass
class Life:
    """A worker between two hellos; `log`: what it trained at each step; `landed`: of every life and fragment the launch
    of the last message that landed, as this one saw it."""

    worker: int
    name: str
    next: int
    trains: bool
    lease: tuple[int, int, int] | None = None
    at: int = 0
    rest: int = 0
    source: tuple[int, int, int] | None = None
    runs: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])
    log: list[tuple[int, Unit]] = field(default_factory=list[tuple[int, Unit]])
    landed: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    seen: set[tuple[int, int, int]] = field(default_factory=set[tuple[int, int, int]])
    mail: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])


@dataclass
class Flying:
    """A fragment's exchange. `inside`: whose contributions will count."""

    fragment: int
    launched: int
    lands: int
    members: list[str]
    inside: set[str]


@dataclass
class World:
    """Islands that train in step, and the account that the coordinator keeps of them.

    `held`: the units that a life trained, or that count, by the plain bookkeeping of this world.
    """

    path: Path
    shards: int
    fragments: int
    delay: int
    rng: random.Random
    silent: bool
    loads: tuple[int, ...] = ()
    step: int = 0
    living: dict[int, Life] = field(default_factory=dict[int, Life])
    dead: list[Life] = field(default_factory=list[Life])
    flying: list[Flying] = field(default_factory=list[Flying])
    held: dict[Unit, str] = field(default_factory=dict[Unit, str])
    landed: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    said: list[str] = field(default_factory=list[str])
    lives: int = 0

    def __post_init__(self) -> None:
        self.start()

    # the coordinator

    def start(self) -> None:
        """Start it, perhaps again."""
        self.units = Units(Ledger(self.path), self._send, self.said.append)

    def restart(self) -> None:
        before = {worker: stays for worker, stays in self.units.stays.items() if stays}
        self.units.ledger.close()
        self.start()
        assert self.units.stays == before

    def _send(self, to: int, message: Message) -> None:
        assert isinstance(message, Lease)
        assert read(b"".join(write(message))) == message
        life, lease = self.living[to], (message.shard, message.first, message.end)
        if life.name == message.life and lease not in life.seen and not (self.silent and self.rng.random() < 0.3):
            life.seen.add(lease)
            life.mail.append(lease)

    def present(self) -> list[int]:
        return sorted(worker for worker, life in self.living.items() if life.trains)

    def report(self, life: Life, *, surely: bool = False) -> None:
        """Its account, which may be lost on its way."""
        if self.silent and not surely and self.rng.random() < 0.4:
            return
        counts = {worker: [0] * self.fragments for worker, _ in life.landed}
        for (worker, fragment), launched in life.landed.items():
            counts[worker][fragment] = launched
        over = min((each.launched - 1 for each in self.flying), default=self.step)
        account = Account(
            life.name,
            self.shards,
            life.next,
            over,
            self.loads,
            tuple(life.runs[-40:]),
            tuple((worker, tuple(steps)) for worker, steps in sorted(counts.items())),
            (life.lease,) if life.lease else (),
        )
        if self.rng.random() < 0.01:
            assert read(b"".join(write(account))) == account
        self.units.account(life.worker, account, self.present(), set(self.living))

    # the islands

    def come(self, worker: int, *, trains: bool) -> None:
        self.lives += 1
        name = f"{worker}-{self.lives}"
        self.living[worker] = Life(worker, name, self.units.came(worker, name, self.step), trains)
        self.units.governed(self.step + 1, set(self.living))

    def enter(self, life: Life) -> None:
        """It has fetched a state, and takes part: all others have promised it, each behind an account."""
        for worker in self.present():
            self.report(self.living[worker], surely=True)
        life.trains = True

    def die(self, worker: int) -> None:
        """Its messages under way count or do not, for all alike."""
        life = self.living.pop(worker)
        self.dead.append(life)
        for each in self.flying:
            if self.rng.random() < 0.5:
                each.inside.discard(life.name)
        self.units.lost([worker])
        self.units.governed(self.step + 1, set(self.living))
        self._settle()

    def train(self) -> None:
        """One inner step of all, and its boundary."""
        self.step += 1
        trainers = [life for life in self.living.values() if life.trains]
        for life in trainers:
            load = self.loads[life.worker] if self.loads else 1
            for ordinal in range(load * (self.step - 1) + 1, load * self.step + 1):
                source, unit = self._deal(life)
                assert unit not in self.held, f"{unit} is trained by {life.name}, though {self.held[unit]} has it"
                self.held[unit] = life.name
                life.log.append((self.step, unit))
                if life.runs and life.source == source:
                    life.runs[-1] = (*life.runs[-1][:3], life.runs[-1][3] + 1)
                else:
                    life.runs.append((ordinal, *unit, 1))
                life.source = source
            if self.rng.random() < 0.3:
                self.report(life)
        for fragment in range(self.fragments):
            if (self.step - fragment * PERIOD // self.fragments) % PERIOD == 0:
                for life in trainers:
                    self.report(life)
                names = [life.name for life in trainers]
                flying = Flying(fragment, self.step, self.step + self.delay, names, set(names))
                self.flying.append(flying)
                if len(self.present()) > 1 and self.rng.random() < 0.1:
                    self.die(self.rng.choice(self.present()))
        self._land()

    def _deal(self, life: Life) -> tuple[tuple[int, int, int] | None, Unit]:
        if not life.lease and not life.rest and life.mail:
            life.lease = life.mail.pop(0)
            life.at = life.lease[1]
        if lease := life.lease:
            shard, first, end = lease
            life.at += 1
            if life.at == end:
                life.lease, life.rest = None, end - first
            return lease, (shard, life.at - 1)
        life.next += 1
        life.rest = max(0, life.rest - 1)
        return None, (life.worker, life.next - 1)

    def _land(self) -> None:
        names = {life.name: life.worker for life in [*self.living.values(), *self.dead]}
        for each in [each for each in self.flying if each.lands <= self.step]:
            self.flying.remove(each)
            # who came meanwhile took over the queue of a donor
            seers = [life for life in self.living.values() if life.trains]
            for name in each.inside if seers else ():
                self.landed[name, each.fragment] = each.launched
                for life in seers:
                    life.landed[names[name], each.fragment] = each.launched
        for life in self.living.values():
            if life.trains:
                self.report(life)
        self._settle()

    def _settle(self) -> None:
        for life in [life for life in self.dead if not any(life.name in each.members for each in self.flying)]:
            # what did not count by now never will
            self.dead.remove(life)
            self.give_up(life)

    def through(self, life: Life) -> int:
        return min(self.landed.get((life.name, fragment), 0) for fragment in range(self.fragments))

    def give_up(self, life: Life) -> None:
        for step, unit in life.log:
            if step > self.through(life):
                del self.held[unit]


def sail(world: World, steps: int, workers: int) -> None:
    """Train, with whatever happens."""
    rng = world.rng
    for worker in range(workers):
        world.come(worker, trains=True)
    for _ in range(steps):
        for life in world.living.values():
            # who fetches a state takes part from the next boundary on
            if not life.trains and world.step % PERIOD == 0 and rng.random() < 0.7:
                world.enter(life)
        world.train()
        away = [worker for worker in range(world.shards) if worker not in world.living]
        if len(world.present()) > 1 and rng.random() < 0.03:
            world.die(rng.choice(world.present()))
        if away and rng.random() < 0.08:
            world.come(rng.choice(away), trains=False)
        if rng.random() < 0.03:
            world.restart()


def missing(world: World, shard: int) -> set[int]:
    """Units that nobody has trained, or has in hand, though later ones were."""
    trained = {unit for at, unit in world.held if at == shard}
    lives = world.living.values()
    in_hand = [*((life.lease[0], life.at, life.lease[2]) for life in lives if life.lease)]
    in_hand += [lease for life in lives for lease in life.mail]
    waiting = {unit for at, first, end in in_hand if at == shard for unit in range(first, end)}
    assert not trained & waiting
    return set(range(max(trained, default=0))) - trained - waiting


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(0, 3),
    st.booleans(),
    st.one_of(st.just(()), st.lists(st.integers(1, 5), min_size=7, max_size=7)),
)
def test_no_unit_is_trained_twice_and_nothing_is_left_behind(
    seed: int, workers: int, fragments: int, delay: int, more: int, silent: bool, loads: Sequence[int]
) -> None:
    loads = tuple(loads[: workers + more])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        world = World(path, workers + more, fragments, delay, random.Random(seed), silent, loads)
        sail(world, 150, workers)
        # a time without faults: whoever is gone is settled, and what was left behind is handed out
        world.silent = False
        world.rng = random.Random(1)
        for life in world.living.values():
            world.enter(life)
        world.die = lambda worker: None  # type: ignore[method-assign]
        for turn in range(60):
            for _ in range(LEASE):
                world.train()
            if turn > 15 and not any(missing(world, shard) for shard in range(world.shards)):
                break
        assert world.units.book.overlaps() == []
        doubted = any("lost before it could say" in line for line in world.said)
        for shard in range(world.shards):
            assert doubted or not missing(world, shard)
            assert max(unit for at, unit in world.held if at == shard) > LEASE, f"nobody trains shard {shard}"
        world.units.ledger.close()


@dataclass
class Desk:
    """An account of three shards, and what was sent and said."""

    folder: Path
    loads: tuple[int, ...] = ()
    sent: list[tuple[int, Message]] = field(default_factory=list[tuple[int, Message]])
    said: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.units = Units(
            Ledger(self.folder / "ledger.sqlite"), lambda to, message: self.sent.append((to, message)), self.said.append
        )

    def come(self, *workers: int, step: int = 0) -> list[int]:
        """With lives that are called after the worker and how often it came."""
        firsts = [self.units.came(worker, f"{worker}.{len(self.units.stays[worker])}", step) for worker in workers]
        self.units.governed(step + 1, workers)
        return firsts

    def lose(self, worker: int, step: int) -> None:
        self.units.lost([worker])
        self.units.governed(step, ())

    def tell(
        self,
        worker: int,
        present: list[int],
        *runs: tuple[int, int, int, int],
        next: int,
        over: int,
        counts: dict[int, tuple[int, ...]],
        leases: tuple[tuple[int, int, int], ...] = (),
    ) -> None:
        life = self.units.stays[worker][-1].life
        account = Account(life, 3, next, over, self.loads, runs, tuple(counts.items()), leases)
        self.units.account(worker, account, present, set(present))


def test_a_lease_is_told_again_until_it_is_in_hand_and_the_next_follows_once_it_is_trained(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert desk.come(0, 1) == [0, 0]
    desk.tell(1, [0, 1], next=0, over=0, counts={})
    assert desk.sent == [], "what worker 0 has in hand is not known"
    desk.tell(0, [0, 1], (1, 0, 0, 5), next=5, over=5, counts={})
    first = (0, Lease("0.0", 2, 0, LEASE))
    assert desk.sent == [first]
    desk.tell(0, [0, 1], (1, 0, 0, 5), next=5, over=5, counts={})
    assert desk.sent == [first, first]
    desk.tell(0, [0, 1], (1, 0, 0, 5), (6, 2, 0, 3), next=5, over=5, counts={}, leases=((2, 0, LEASE),))
    assert desk.sent == [first, first]
    desk.tell(1, [0, 1], next=0, over=5, counts={})
    assert desk.sent[2:] == [(1, Lease("1.0", 2, LEASE, 2 * LEASE))]
    desk.tell(0, [0, 1], (1, 0, 0, 5), (6, 2, 0, LEASE), next=5, over=20, counts={})
    assert desk.sent[3:] == [(0, Lease("0.0", 2, 2 * LEASE, 3 * LEASE))]


def test_who_trains_several_units_in_a_step_has_as_many_given_back_for_each_step_that_does_not_count(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path, loads=(1, 1, 3))
    desk.come(0, 1, 2)
    for worker, load in enumerate(desk.loads):
        run = (1, worker, 0, 12 * load)
        desk.tell(worker, [0, 1, 2], run, next=12 * load, over=9, counts={2: (5,)})
    desk.lose(2, 13)
    again = Desk(tmp_path, loads=(1, 1, 3))
    assert again.units.stays == desk.units.stays
    assert again.come(2, step=14) == [42], "three units in each of 12 steps, and in two that were not heard of"
    again.lose(2, 15)
    for worker in range(2):
        again.tell(worker, [0, 1], (1, worker, 0, 20), next=20, over=20, counts={2: (5,)})
    before, _ = again.units.stays[2]
    assert [(run.first, run.end) for run in before.runs.values()] == [(0, 15)]
    assert again.sent == [(1, Lease("1.0", 2, 15, 15 + LEASE))]


def test_what_counts_of_the_life_before_is_not_read_off_what_landed_of_the_next(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.come(0, 1, 2)
    for worker in range(3):
        desk.tell(worker, [0, 1, 2], (1, worker, 0, 12), next=12, over=9, counts={2: (5, 5)})
    desk.lose(2, 13)
    assert desk.come(2, step=14) == [14], "two steps of worker 2 may not have been heard of"
    # worker 0 still waits for what began before; of worker 2 a part left at step 20 and has landed
    desk.tell(0, [0, 1, 2], (1, 0, 0, 20), next=20, over=11, counts={2: (20, 10)})
    desk.tell(1, [0, 1, 2], (1, 1, 0, 20), next=20, over=20, counts={2: (20, 20)})
    desk.tell(2, [0, 1, 2], (15, 2, 14, 6), next=20, over=20, counts={})
    assert [stay.closed for stay in desk.units.stays[2]] == [False, False]
    desk.tell(0, [0, 1, 2], (1, 0, 0, 20), next=20, over=20, counts={2: (20, 20)})
    before, after = desk.units.stays[2]
    assert (before.closed, before.counts, [run.end for run in before.runs.values()]) == (True, 5, [5])
    assert (after.closed, after.counts) == (False, 20)
    assert desk.sent == [(0, Lease("0.0", 2, 5, 14))]


def test_where_more_counts_than_was_said_nothing_is_trained_again_that_may_count(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.come(0, 1)
    desk.tell(0, [0, 1], (1, 0, 0, 10), next=10, over=10, counts={})
    desk.tell(1, [0, 1], (1, 1, 0, 10), next=10, over=10, counts={})
    assert desk.sent == [(1, Lease("1.0", 2, 0, LEASE))]
    desk.lose(1, 31)
    desk.tell(0, [0], (1, 0, 0, 35), next=35, over=35, counts={1: (30,)})
    assert len(desk.said) == 1
    assert f"steps 11 to 30; nobody trains units 10 to 29 of shard 1, 0 to {LEASE - 1} of shard 2 again" in desk.said[0]
    assert desk.sent[1:] == [(0, Lease("0.0", 1, 30, 30 + LEASE))]


def test_units_that_two_workers_trained_are_said_loudly_and_kept(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.come(0, 1)
    desk.tell(0, [0, 1], (1, 0, 0, 10), next=10, over=10, counts={})
    desk.tell(1, [0, 1], (1, 1, 0, 5), (6, 0, 7, 5), next=5, over=10, counts={})
    assert desk.units.book.overlaps() == [(0, 7, 10, 1, 0)]
    assert "units 7 to 9 of shard 0 were trained by worker 1, though worker 0 had them" in desk.said[0]


def test_who_begins_again_from_a_checkpoint_has_what_it_had_then_and_the_rest_is_as_it_was(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.come(0, 1, 2)
    for worker in range(3):
        desk.tell(worker, [0, 1, 2], (1, worker, 0, 28), next=28, over=25, counts={0: (25,), 1: (25,), 2: (25,)})
    for worker in range(3):
        desk.units.lost([worker])
    # 0 and 1 come with checkpoints of step 20, whose pending steps were 16 to 20; 2 does not come
    desk.units.came(0, "0.1", 28)
    desk.units.came(1, "1.1", 28)
    desk.units.begins(20, (0, 1))
    desk.units.governed(21, (0, 1))
    again = Desk(tmp_path)
    assert again.units.stays == desk.units.stays
    assert [(stay.life, stay.lost, stay.last) for stay in desk.units.stays[0]] == [("0.1", False, 20)]
    counts = {0: (15,), 1: (15,), 2: (15,)}
    desk.tell(0, [0, 1], (1, 0, 0, 20), next=20, over=20, counts=counts)
    desk.tell(1, [0, 1], (1, 1, 0, 20), next=20, over=20, counts=counts)
    (gone,) = desk.units.stays[2]
    assert (gone.closed, gone.counts, [run.end for run in gone.runs.values()]) == (True, 15, [15])
    assert desk.sent == [(1, Lease("1.1", 2, 15, 15 + LEASE))]
    assert desk.units.book.overlaps() == []
