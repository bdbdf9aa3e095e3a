"""What the coordinator knows, in a file: written before anyone is told, so that it can be killed at any moment."""

import json
import sqlite3
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.errors import GroupError, UsageError
from atoll.peers.wide.messages import Committed, Epoch, Settle
from atoll.wire import Key

PLACES = "places"
"""The fact of which worker numbers have been given away."""

_TABLES = """
create table if not exists facts (name text primary key, value text not null);
create table if not exists epochs (number integer primary key, record text not null);
create table if not exists settled (key text primary key, out text not null);
create table if not exists rounds (
    key text primary key, peers text not null, digest text not null, lost integer not null, workers text not null
);
"""


class Ledger:
    """The file of one run.

    Raises: UsageError if it cannot be opened, GroupError if it cannot be written: what was written before stays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # whoever holds it is asked for one thing at a time, by whatever thread
            self.connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self.connection.execute("pragma journal_mode = wal")
            self.connection.execute("pragma synchronous = full")
            self.connection.executescript(_TABLES)
        except sqlite3.Error as error:
            raise UsageError(f"{path} cannot be opened as a run's ledger ({error}); give another directory") from None

    @contextmanager
    def together(self) -> Generator[None]:
        """What is written in here is written at once, or not at all."""
        with self._told():
            self.connection.execute("begin immediate")
            try:
                yield
                self.connection.execute("commit")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("rollback")
                raise

    @contextmanager
    def _told(self) -> Generator[None]:
        try:
            yield
        except sqlite3.Error as error:
            full = "the disk is full" if "full" in str(error) else str(error)
            raise GroupError(
                f"{self.path} could not be written ({full}); nothing was decided that is not in it, so make room and "
                "start the coordinator again: the islands train on meanwhile"
            ) from error

    def _write(self, statement: str, *values: Any) -> None:
        with self._told():
            self.connection.execute(statement, values)

    def fact(self, name: str) -> Any:
        """What was noted under a name, or None."""
        row = self.connection.execute("select value from facts where name = ?", (name,)).fetchone()
        return json.loads(row[0]) if row else None

    def note(self, name: str, value: Any) -> None:
        """Note a fact; the newest counts."""
        self._write("insert or replace into facts values (?, ?)", name, json.dumps(value))

    def epochs(self) -> list[Epoch]:
        """All of them, ascending."""
        rows = self.connection.execute("select record from epochs order by number").fetchall()
        found: list[Epoch] = []
        for (record,) in rows:
            number, step, *members = json.loads(record)
            found.append(Epoch(number, step, *map(tuple, members)))
        return found

    def govern(self, epoch: Epoch) -> None:
        """A new epoch."""
        record = [epoch.number, epoch.step, epoch.workers, epoch.joining, epoch.donors]
        self._write("insert into epochs values (?, ?)", epoch.number, json.dumps(record))

    def settled(self) -> Iterator[Settle]:
        """What was decided of exchanges that lost members."""
        for key, out in self.connection.execute("select key, out from settled").fetchall():
            rule, fragment, round_, *to = json.loads(key)
            decided = tuple((tuple(workers), bool(counts)) for workers, counts in json.loads(out))
            yield Settle(Key(rule, fragment, round_), tuple(to), decided, 0)

    def lost(self) -> dict[int, int]:
        """In which epoch each worker was gone last."""
        return {int(worker): number for worker, number in (self.fact("lost") or {}).items()}

    def lose(self, lost: Mapping[int, int]) -> None:
        """Note it."""
        self.note("lost", dict(lost))

    def committed(self, key: Key, to: tuple[int, ...]) -> list[int]:
        """Who has told that an exchange counts, or is lost."""
        row = self.connection.execute("select workers from rounds where key = ?", (_key(key, to),)).fetchone()
        return json.loads(row[0]) if row else []

    def settle(self, settle: Settle) -> None:
        """Decide."""
        self._write("insert or replace into settled values (?, ?)", _key(settle.key, settle.to), json.dumps(settle.out))

    def commit(self, worker: int, told: Committed) -> str | None:
        """Note that a round counts, or is lost, as a worker says. Returns a sentence if another one says otherwise."""
        key = _key(told.key, told.to)
        row = self.connection.execute(
            "select peers, digest, lost, workers from rounds where key = ?", (key,)
        ).fetchone()
        mine = (json.dumps(told.peers), told.digest, int(told.lost))
        workers = json.loads(row[3]) if row else []
        if row and row[1:3] != mine[1:]:
            return f"worker {worker} came to {told.digest[:16]} in {told.key}, but workers {workers} to {row[1][:16]}"
        if worker not in workers:
            self._write(
                "insert or replace into rounds values (?, ?, ?, ?, ?)", key, *mine, json.dumps([*workers, worker])
            )
        return None

    def forget_rounds(self) -> None:
        """Begin again from an earlier state: what became of later rounds does not hold."""
        with self.together():
            self.connection.execute("delete from settled")
            self.connection.execute("delete from rounds")

    def rounds(self, last: int) -> list[tuple[Key, tuple[int, ...], str, bool]]:
        """The last rounds that were told of, newest first: key, who counts, digest, whether lost."""
        rows = self.connection.execute(
            "select key, peers, digest, lost from rounds order by rowid desc limit ?", (last,)
        ).fetchall()
        return [
            (Key(*json.loads(key)[:3]), tuple(json.loads(peers)), digest, bool(lost))
            for key, peers, digest, lost in rows
        ]

    def close(self) -> None:
        """Close the file."""
        self.connection.close()


def _key(key: Key, to: tuple[int, ...]) -> str:
    return json.dumps([*key[:3], *to])
