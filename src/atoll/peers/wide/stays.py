"""What is known of each life of a worker in a run, and its place in the ledger."""

import json
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from atoll.peers.wide.ledger import Ledger

_TABLES = """
create table if not exists stays (worker integer, number integer, record text not null, primary key (worker, number));
create table if not exists runs (
    worker integer, number integer, ordinal integer, shard integer, first integer, count integer,
    primary key (worker, number, ordinal, shard, first)
);
create table if not exists overlaps (shard integer, first integer, end integer, one integer, other integer);
"""


@dataclass(frozen=True)
class Run:
    """As the worker's `ordinal`-th, counted from the run's first inner step, and the `count - 1` after it: the unit
    `first` of a shard and those after it."""

    ordinal: int
    shard: int
    first: int
    count: int

    @property
    def key(self) -> tuple[int, int, int]:
        """What stays as it grows."""
        return self.ordinal, self.shard, self.first

    @property
    def end(self) -> int:
        """The unit after the last."""
        return self.first + self.count

    @property
    def last(self) -> int:
        """The ordinal of the last."""
        return self.ordinal + self.count - 1


@dataclass
class Stay:
    """A worker's life in the run, from one hello to the next.

    `number`: among those of the worker. `first`: the unit from which it went on with its own shard. `since`,
    `until`: the steps from which on it took part, or fetched a state for it, and took no part any more, once that is
    known. `closed`: what counts of it is known, and the rest was given back. `counts`: the inner step through which its
    work counts; `parts`: the same for each fragment. `lease`: (shard, first, end) that it was handed out. `load`: units
    that it trains in an inner step.
    """

    worker: int
    number: int
    life: str
    first: int
    since: int | None = None
    until: int | None = None
    lost: bool = False
    closed: bool = False
    counts: int = 0
    lease: tuple[int, int, int] | None = None
    parts: tuple[int, ...] = ()
    load: int = 1
    runs: dict[tuple[int, int, int], Run] = field(default_factory=dict[tuple[int, int, int], Run])

    @property
    def last(self) -> int:
        """The last inner step of which it is known what was trained."""
        if self.runs:
            return -(-max(run.last for run in self.runs.values()) // self.load)
        return (self.since or 1) - 1

    def all(self) -> Iterator[tuple[int, int, int]]:
        """(shard, first, end) of what it trained, and of what is left of its lease."""
        yield from ((run.shard, run.first, run.end) for run in self.runs.values())
        if rest := self.rest():
            yield rest

    def holds(self, shard: int) -> Iterator[tuple[int, int]]:
        """[first, end) of what it has of a shard."""
        return ((first, end) for each, first, end in self.all() if each == shard)

    def rest(self) -> tuple[int, int, int] | None:
        """What is left of its lease, which is trained in order."""
        if not self.lease:
            return None
        shard, first, end = self.lease
        mine = [run.end for run in self.runs.values() if run.shard == shard and run.first < end and run.end > first]
        first = max(mine, default=first)
        return (shard, first, end) if first < end else None

    def keep(self, step: int) -> None:
        """Forget what was trained after an inner step."""
        end = self.load * step + 1
        kept = (replace(run, count=min(run.count, end - run.ordinal)) for run in self.runs.values())
        self.runs = {run.key: run for run in kept if run.count > 0}


class Book:
    """Where stays are written down."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        ledger.connection.executescript(_TABLES)

    @contextmanager
    def together(self) -> Generator[None]:
        """What is written in here is written at once, or not at all."""
        if self._ledger.connection.in_transaction:
            yield
        else:
            with self._ledger.together():
                yield

    def stays(self) -> list[Stay]:
        """All of them, in the order of each worker's."""
        connection, found = self._ledger.connection, dict[tuple[int, int], Stay]()
        for worker, number, record in connection.execute("select * from stays order by worker, number").fetchall():
            life, first, since, until, lost, closed, counts, lease, parts = json.loads(record)
            lease = tuple(lease) if lease else None
            found[worker, number] = Stay(
                worker, number, life, first, since, until, lost, closed, counts, lease, tuple(parts)
            )
        for worker, number, *run in connection.execute("select * from runs").fetchall():
            made = Run(*run)
            found[worker, number].runs[made.key] = made
        return list(found.values())

    def write(self, stay: Stay, runs: Iterable[Run] = ()) -> None:
        """A stay, and those of its runs that have changed."""
        place = (stay.worker, stay.number)
        when = [stay.since, stay.until, stay.lost, stay.closed]
        # of parts, too: who told them may be gone, and who came after that knows only what has landed since
        record = [stay.life, stay.first, *when, stay.counts, stay.lease, stay.parts]
        with self.together():
            self._execute("insert or replace into stays values (?, ?, ?)", [(*place, json.dumps(record))])
            rows = [(*place, run.ordinal, run.shard, run.first, run.count) for run in runs]
            self._execute("insert or replace into runs values (?, ?, ?, ?, ?, ?)", rows)

    def forget(self, stay: Stay) -> None:
        """A stay's runs."""
        self._execute("delete from runs where worker = ? and number = ?", [(stay.worker, stay.number)])

    def clear(self) -> None:
        """All stays."""
        self._execute("delete from stays", [()])
        self._execute("delete from runs", [()])

    def overlap(self, shard: int, first: int, end: int, one: int, other: int) -> None:
        """Units that two workers have trained."""
        self._execute("insert into overlaps values (?, ?, ?, ?, ?)", [(shard, first, end, one, other)])

    def overlaps(self) -> list[tuple[int, int, int, int, int]]:
        """(shard, first, end, one worker, the other) of each."""
        return self._ledger.connection.execute("select * from overlaps").fetchall()

    def _execute(self, statement: str, rows: Iterable[tuple[int | str, ...]]) -> None:
        with self.together():
            self._ledger.connection.executemany(statement, rows)
