"""Islands that train real shards, die and come back: each unit counts at most once, and none stays behind."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import Tensor

from atoll.parts.mixers import by_tokens
from atoll.peers.wide.group import WideGroup
from atoll.peers.wide.server import Server
from atoll.recipes.methods import diloco, streaming, weigh
from atoll.testing.islands import Loopback, Sea, serve
from atoll.train import island as islands
from atoll.train.corpus import load_corpus
from atoll.train.inner import AdamW
from atoll.train.island import Island
from atoll.train.run import Data, Method, Run
from atoll.train.shards import make_shards
from atoll.train.tokens import bytes_tokenizer
from atoll.train.units import UnitShard
from atoll.wire import Event, Landed
from tests.peers.wide.chaos import hurried
from tests.train.reef import Reef, go

Unit = tuple[int, int]
PERIOD = 5


@dataclass
class Boat:
    """An island in a thread. `lives`: the units of each step, from one state that it took over to the next."""

    sea: Sea
    run: Run
    number: int
    known: dict[bytes, Unit]
    steps: Callable[[], None] = lambda: None
    out: Path | None = None
    patience: float = 5.0
    lives: list[dict[int, list[Unit]]] = field(default_factory=list[dict[int, list[Unit]]])
    landed: list[tuple[int, tuple[int, ...], int]] = field(default_factory=list[tuple[int, tuple[int, ...], int]])
    result: Any = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.killed = False
        self.thread = threading.Thread(target=self._sail, daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """As if by SIGKILL."""
        self.killed = True
        self.sea.sink(self.number, self.port)
        threading.Thread(target=self.group.close, daemon=True).start()

    def join(self) -> None:
        self.thread.join(90.0)
        assert not self.thread.is_alive()
        if self.error and not self.killed:
            raise self.error

    @property
    def step(self) -> int:
        return max((max(life, default=0) for life in self.lives), default=0)

    @contextmanager
    def _way(self, told: str, step: int) -> Generator[WideGroup]:
        self.port = Loopback(self.sea, self.number)
        self.group = WideGroup(self.port, "run", "1", step, told=told, patience=self.patience)
        try:
            yield self.group
        finally:
            self.group.close()

    def _sail(self) -> None:
        try:
            resume = self.out is not None and (self.out / "config.json").exists()
            self.result = Island(self.run, self.number, self._way, self.out, resume, quiet=True).train()
        except BaseException as error:
            self.error = error


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boats whose units and landings are written down as they come, beside the account under test."""
    boats: dict[threading.Thread, Boat] = {}
    begin, draw, heard = UnitShard.begin, UnitShard.next_batch, UnitShard.heard

    def begins(units: UnitShard, step: int, first: int) -> None:
        begin(units, step, first)
        boats[threading.current_thread()].lives.append({})

    def draws(units: UnitShard) -> Tensor:
        boat = boats[threading.current_thread()]
        boat.steps()
        if boat.killed:
            raise SystemExit
        batch = draw(units)
        step = -(-units._ordinal // boat.run.load_of(boat.number))  # pyright: ignore[reportPrivateUsage]
        boat.lives[-1].setdefault(step, []).append(boat.known[_bytes(batch)])
        return batch

    def hears(units: UnitShard, events: list[Event], state: Any) -> None:
        boat = boats[threading.current_thread()]
        events = list(events)
        landed = [event for event in events if isinstance(event, Landed)]
        boat.landed += [(event.key.fragment, event.peers, state.step - event.age) for event in landed]
        heard(units, events, state)

    monkeypatch.setattr(UnitShard, "begin", begins)
    monkeypatch.setattr(UnitShard, "next_batch", draws)
    monkeypatch.setattr(UnitShard, "heard", hears)
    monkeypatch.setattr(islands, "make_model", lambda *_: Reef())
    real = Boat._sail  # pyright: ignore[reportPrivateUsage]

    def sail(boat: Boat) -> None:
        boats[threading.current_thread()] = boat
        real(boat)

    monkeypatch.setattr(Boat, "_sail", sail)


def _bytes(batch: Tensor) -> bytes:
    return batch.numpy().tobytes()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random, folder = Random(0), tmp_path_factory.mktemp("text")
    words = [bytes(random.choices(b"abcdefghij", k=random.randrange(2, 9))).decode() for _ in range(300)]
    (folder / "a.txt").write_text(" ".join(random.choices(words, k=40_000)))
    return folder


def made(
    text: Path, method: Method, workers: int, steps: int, loads: tuple[int, ...] = ()
) -> tuple[Run, dict[bytes, Unit]]:
    """A run, and its units by the first of their batches."""
    data = Data(f"text:{text}", batch=2, length=16)
    run = Run(Method(method.name, method.strategy, AdamW(lr=1e-3), period=PERIOD), data=data, workers=workers,
              steps=steps, loads=loads, warmup=2)  # fmt: skip
    steps *= max(loads, default=1)
    corpus = load_corpus(data.source, bytes_tokenizer())
    shards = make_shards(corpus, data.sharding, workers=workers, batch=2, length=16, seed=run.seed)
    known = {_bytes(shard.next_batch()): (m, unit) for m, shard in enumerate(shards) for unit in range(2 * steps)}
    assert len(known) == 2 * workers * steps
    return run, known


@contextmanager
def coast(folder: Path, count: int, lease: float = 5.0) -> Generator[tuple[Sea, Server, list[str]]]:
    sea, said = Sea(), list[str]()
    server = serve(sea, folder, count, said.append, lease=lease)
    try:
        yield sea, server, said
    finally:
        server.close()


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def counted(boats: list[Boat]) -> Counter[Unit]:
    """By what landed with whom, whoever saw it: how often each unit is in what is shared."""
    landed: dict[tuple[int, int], set[int]] = {}
    fragments = {fragment for boat in boats for fragment, _, _ in boat.landed}
    for boat in boats:
        for fragment, peers, launched in boat.landed:
            for worker in peers:
                landed.setdefault((worker, fragment), set()).add(launched)
    found = Counter[Unit]()
    for boat in boats:
        for life in boat.lives:
            if not life:
                continue
            first, last = min(life), max(life)
            through = min(
                max((at for at in landed.get((boat.number, fragment), ()) if first <= at <= last), default=0)
                for fragment in fragments
            )
            found.update(unit for step, units in life.items() if step <= through for unit in units)
    return found


METHODS = [diloco(PERIOD), streaming(PERIOD, fragments=2, delay=2)]


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("loads", [(), (1, 3, 2)], ids=["alike", "unequal"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_dead_islands_units_are_trained_by_others_and_none_counts_twice(
    method: Method, loads: tuple[int, ...], text: Path, tmp_path: Path
) -> None:
    run, known = made(text, method, 3, 240, loads)
    crew: list[Boat] = []

    def pace() -> None:
        # slowly while one is on its way
        time.sleep(0.1 if len(crew) > 3 and not any(crew[3].lives) else 0.004)

    with coast(tmp_path, 3) as (sea, server, said):
        crew += [Boat(sea, run, number, known, pace) for number in range(3)]
        until(lambda: crew[1].step > 23)
        crew[1].kill()
        until(lambda: crew[0].step > 110)
        crew.append(Boat(sea, run, 1, known, pace))
        for boat in crew:
            boat.join()
        overlaps = server.coordinator.units.book.overlaps()
    assert overlaps == []
    assert [life for life in crew[3].lives if life], "it did not come back"
    found = counted(crew)
    assert max(found.values()) == 1
    dead = {unit for units in crew[1].lives[-1].values() for unit in units}
    assert dead - set(found) == set(), said
    lent = {unit for boat in (crew[0], crew[2]) for life in boat.lives for units in life.values() for unit in units}
    assert any(shard == 1 for shard, _ in lent)
    others = {unit for unit in found if unit[0] == 1}
    back = min(index for life in crew[3].lives for units in life.values() for shard, index in units if shard == 1)
    assert {index for _, index in others} >= set(range(back)), "something was left behind"


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("loads", [(1, 1, 1), (1, 3, 2)], ids=["alike", "unequal"])
def test_without_faults_islands_train_what_they_would_train_in_one_process(
    loads: tuple[int, ...], text: Path, tmp_path: Path
) -> None:
    run, known = made(text, weigh(METHODS[0], by_tokens()), 3, 40, loads)
    whole = go(run)
    with coast(tmp_path, 3) as (sea, _, _):
        crew = [Boat(sea, run, number, known) for number in range(3)]
        for boat in crew:
            boat.join()
    for boat in crew:
        load = loads[boat.number]
        assert boat.result.digest == whole.digest
        assert boat.result.tokens == 40 * load * 2 * 16
        assert boat.lives[-1] == {
            step: [(boat.number, unit) for unit in range(load * (step - 1), load * step)] for step in range(1, 41)
        }


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_slow_island_trains_its_own_units_and_nobody_trains_them_for_it(
    method: Method, text: Path, tmp_path: Path
) -> None:
    """A round of it takes longer than the lease."""
    run, known = made(text, method, 3, 15)
    whole = go(run)
    with hurried(), coast(tmp_path, 3, lease=0.5) as (sea, server, said):
        paces = [lambda: None, lambda: None, lambda: time.sleep(0.15)]
        crew = [Boat(sea, run, number, known, pace, patience=0.5) for number, pace in enumerate(paces)]
        for boat in crew:
            boat.join()
        assert server.coordinator.units.book.overlaps() == []
    assert [line for line in said if "gone" in line] == []
    for boat in crew:
        assert boat.result.digest == whole.digest
        assert boat.lives[-1] == {step: [(boat.number, step - 1)] for step in range(1, 16)}
    assert set(counted(crew).values()) == {1}


@pytest.mark.usefixtures("watched")
def test_all_begin_again_from_checkpoints_and_train_on_as_if_nothing_had_been(text: Path, tmp_path: Path) -> None:
    run, known = made(text, METHODS[0], 2, 60)
    whole = go(run)

    def sail(pace: float) -> list[Boat]:
        outs = [tmp_path / str(number) for number in range(2)]
        return [Boat(sea, run, number, known, lambda: time.sleep(pace), out) for number, out in enumerate(outs)]

    with coast(tmp_path, 2) as (sea, _, _):
        killed = sail(0.01)
        until(lambda: min(boat.step for boat in killed) > 23)
        for boat in killed:
            boat.kill()
        for boat in killed:
            boat.join()
    with coast(tmp_path, 2) as (sea, server, said):
        crew = sail(0.0)
        for boat in crew:
            boat.join()
        stays = server.coordinator.units.stays
        assert server.coordinator.units.book.overlaps() == []
        assert [[(stay.counts, stay.lost) for stay in stays[worker]] for worker in range(2)] == [[(60, False)]] * 2
    for boat in crew:
        assert boat.result.digest == whole.digest, said
        assert all(units == [(boat.number, step - 1)] for step, units in boat.lives[-1].items())
