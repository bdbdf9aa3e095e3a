"""Units of data on an island among others that come and go: its own shard in order, and between, what it is handed of
others'.

A unit is what one inner step trains where nobody is faster than others: (shard, index). An island of more load trains
as many units in one. One that is never handed anything draws the batches that it would draw from its shard alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from atoll.parts.estimates import own
from atoll.parts.landings import Blocking
from atoll.parts.mixers import Situation, Work
from atoll.sync.carry import Carry
from atoll.sync.flow import CLOSING
from atoll.sync.state import SyncState, Track
from atoll.train.blocks import BlockShard, Shard
from atoll.wire import Event, Landed, Membership

RECENT, MOST = 16, 1024
"""Runs that are told though they count already; runs after which nothing more is taken before some of them count."""


class Lease(NamedTuple):
    """The units `first` to `end - 1` of a shard."""

    shard: int
    first: int
    end: int


_NOTHING = Lease(0, 0, 0)
"""What was in hand before anything was dealt."""


class Handing(Protocol):
    """The way to whoever hands out units, and wants to know what becomes of them."""

    @property
    def first(self) -> int:
        """The unit from which this island's own shard goes on, behind all that others know of."""
        ...

    def lease(self) -> tuple[int, int, int] | None:
        """(shard, first, end) of what was handed to this island, once each."""
        ...

    def account(
        self,
        *,
        shards: int,
        next: int,
        over: int,
        loads: tuple[int, ...],
        runs: tuple[tuple[int, int, int, int], ...],
        counts: tuple[tuple[int, tuple[int, ...]], ...],
        leases: tuple[tuple[int, int, int], ...],
    ) -> None:
        """Tell it, before anything that is posted from now on.

        Args: shards: of which units can be handed out, from 0 on. next: the unit of its own shard that comes next.
        over: all that was launched by this inner step has landed, or is lost. loads: units that each worker trains in
        an inner step; one if empty. runs: (ordinal, shard, unit, count) of what it trained in a row; with a load of
        k, its units k (t - 1) + 1 to k t are those of inner step t. counts: of each worker the step at which the last
        message left that landed with somebody else, by fragment. leases: what it has in hand.
        """
        ...


class UnitShard:
    """The batches of worker `number`: its own units in order, and after each lease as many of its own before the next.

    Args: shards: all of the run. accumulate: batches of a unit. hand: who hands out units. loads: as `Run` has them.
    Attributes: turned: a lease has come to its end, and nobody was told.
    """

    def __init__(
        self, shards: Sequence[Shard], number: int, accumulate: int, hand: Handing, loads: tuple[int, ...] = ()
    ) -> None:
        self._shards, self._number, self._accumulate, self._hand = shards, number, accumulate, hand
        self._loads, self._load = loads, loads[number] if loads else 1
        self._places, self._next = [0] * len(shards), 0
        self._parts: Mapping[tuple[int, int], int] = {}
        self.begin(0, 0)

    def begin(self, step: int, first: int) -> None:
        """Train on after inner step `step`, with a state that others hold: own units go on from `first`, and what was
        in hand is no more."""
        self._ordinal, self._next = step * self._load, max(self._next, first)
        self._runs: list[tuple[int, int, int, int]] = []
        self._counts: dict[int, list[int]] = {}
        self._lease: Lease | None = None
        self._source: Lease | None = _NOTHING
        self._at = self._part = self._rest = 0
        self.turned = False

    @property
    def size(self) -> int:
        """Tokens of a pass of its own shard."""
        return self._shards[self._number].size

    @property
    def passes(self) -> int:
        """Complete passes of its own shard."""
        return self._shards[self._number].passes

    def next_batch(self) -> Tensor:
        """Tokens int64 [batch, length + 1]."""
        if self._part == 0:
            self._deal()
        self._part = (self._part + 1) % self._accumulate
        return self._shards[self._runs[-1][1]].next_batch()

    def _deal(self) -> None:
        """Go on to the next unit."""
        if not self._lease and not self._rest and len(self._runs) < MOST and (handed := self._hand.lease()):
            self._lease = Lease(*handed)
            self._at = self._lease.first
        lease, self._ordinal = self._lease, self._ordinal + 1
        if lease:
            shard, unit, self._at = lease.shard, self._at, self._at + 1
            if self._at == lease.end:
                self._lease, self._rest, self.turned = None, lease.end - lease.first, True
        else:
            shard, unit, self._next, self._rest = self._number, self._next, self._next + 1, max(0, self._rest - 1)
        if self._source is lease:
            ordinal, _, first, count = self._runs[-1]
            self._runs[-1] = (ordinal, shard, first, count + 1)
        else:
            self._runs.append((self._ordinal, shard, unit, 1))
        self._source = lease
        self._go(shard, unit)

    def _go(self, shard: int, unit: int) -> None:
        """Move a shard to a unit of it."""
        there, place = self._shards[shard], self._places[shard]
        self._places[shard] = unit + 1
        if isinstance(there, BlockShard):
            if place != unit:
                there.seek(unit * self._accumulate)
        else:
            for _ in range((unit - place) * self._accumulate):
                there.next_batch()

    # what becomes of them

    def heard(self, events: Iterable[Event], state: SyncState) -> None:
        """Take note of what has landed at the boundary of `state.step`."""
        self._parts = self._parts or _parts(state)
        me, others = (self._number,), len(state.membership.workers) > 1
        for landed in (event for event in events if isinstance(event, Landed)):
            part = self._parts.get(landed.key[:2])
            if part is None or (others and landed.peers == me and landed.share == 1):
                continue  # it met nobody, though others are there
            for worker in landed.peers:
                counts = self._counts.setdefault(worker, [0] * len(set(self._parts.values())))
                counts[part] = max(counts[part], state.step - landed.age)

    def tell(self, state: SyncState) -> None:
        """Give account: before each boundary, so that it is known what leaves there, and when something has come of
        it."""
        through = self._load * min(self._counts.get(self._number, [0]))
        old = [run for run in self._runs[:-RECENT] if run[0] + run[3] - 1 > through]
        self._runs = [*old, *self._runs[-RECENT:]]
        self._hand.account(
            shards=len(self._shards) if all(isinstance(shard, BlockShard) for shard in self._shards) else 0,
            next=self._next,
            over=min((entry.launched - 1 for entry in state.queue), default=state.step),
            loads=self._loads,
            runs=tuple(self._runs),
            counts=tuple((worker, tuple(steps)) for worker, steps in sorted(self._counts.items())),
            leases=(self._lease,) if self._lease else (),
        )
        self.turned = False

    def state_dict(self) -> dict[str, Any]:
        """The position, and what has yet to count: JSON-able values."""
        return {
            "shard": self._shards[self._number].state_dict(),
            "place": self._places[self._number],
            "ordinal": self._ordinal,
            "next": self._next,
            "rest": self._rest,
            "runs": self._runs,
            "counts": sorted(self._counts.items()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, but for what was in hand and not trained yet: it is handed out again.

        Raises: CheckpointError when it belongs to other data.
        """
        self._shards[self._number].load_state_dict(state["shard"])
        self._places[self._number] = state["place"]
        self.begin(0, state["next"])
        self._ordinal, self._next, self._rest = state["ordinal"], state["next"], state["rest"]
        self._runs = [(ordinal, shard, first, count) for ordinal, shard, first, count in state["runs"]]
        self._counts = {worker: list(steps) for worker, steps in state["counts"]}


def _parts(state: SyncState) -> dict[tuple[int, int], int]:
    """(rule, fragment) of the messages that bring a worker's work to others, and which fragment of such it is.

    Deltas and live; and anchors, where each holds all of its worker's work by the boundary at which it leaves.
    """
    closing = [track for track in state.tracks if track.rule.carry in CLOSING]
    behind = {track.fragment.index for track in closing if not _moves_at_once(track)}
    anchors = [track for track in state.tracks if track.rule.carry is Carry.ANCHOR]
    bring = [*closing, *(track for track in anchors if track.fragment.index not in behind)]
    bring = [track for track in bring if _meets(track)]
    numbers = {index: number for number, index in enumerate(sorted({track.fragment.index for track in bring}))}
    return {(track.rule_index, track.fragment.index): numbers[track.fragment.index] for track in bring}


def _moves_at_once(track: Track) -> bool:
    """Whether the anchor has moved by the message that leaves at a boundary when the boundary ends, come what may."""
    return isinstance(track.rule.landing, Blocking) and (isinstance(track.rule.estimate, own) or not _meets(track))


def _meets(track: Track) -> bool:
    """Whether two workers would ever meet."""
    at = Situation(Membership((0, 1), 0), 0, Work(1, 1), {}, track.rule.codec, track.message)
    return len(track.rule.mixer.exchange(at).to) > 1
