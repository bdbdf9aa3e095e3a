"""SyncState: the whole truth about one worker's part in a strategy. Saving and restoring it resumes bit for bit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import CheckpointError, ModelError
from atoll.parts.estimates import eager
from atoll.parts.landings import After, Blocking, OnArrival
from atoll.parts.merges import carry_on
from atoll.parts.mixers import Work
from atoll.parts.schedules import NEVER
from atoll.sync.rule import Carry, Rule, Strategy, layout_of
from atoll.trees import (
    Layout,
    Live,
    Spec,
    State,
    Tree,
    averaged_buffers,
    beside,
    digest,
    frozen,
    local,
    spec_of,
    trainable,
    whole,
)
from atoll.wire import Key, Landed, Lost, Membership, Snapshot


@dataclass
class Fragment:
    """Tensors that are synced together: their layout, the model's own tensors, and the anchor (None where gradients
    are carried). `turn`: the number of the strategy's fragment that it is, or is part of."""

    index: int
    turn: int
    layout: Layout
    tensors: list[Tensor]
    live: Live
    anchor: Tree | None


@dataclass
class Track:
    """One rule serving one fragment, with everything that grows from round to round."""

    rule_index: int
    rule: Rule
    fragment: Fragment
    outer: State
    codec: State
    round: int = 0
    updates: int = 0
    due: int = NEVER
    launched: Work = Work(0, 0)

    @property
    def remembers(self) -> bool:
        """Whether what was sent is needed at the landing: live, to move it by (mean - sent), or the delta, to replace
        it by a fresh one."""
        rule = self.rule
        moved = rule.carry is Carry.LIVE and isinstance(rule.landing, After) and isinstance(rule.merge, carry_on)
        return moved or isinstance(rule.estimate, eager)

    @property
    def message(self) -> Layout:
        """The layout of what is sent."""
        return message(self.rule, self.fragment.layout)


@dataclass
class InFlight:
    """An exchange between launch and landing.

    `since`: the work done when the round before it left, which counts again if this one is lost. `sent`: what was sent,
    where the track remembers it. `members`: how many were to meet; `weight`: of this contribution. `outcome` is set
    when it has been collected ahead of its step (for a checkpoint).
    """

    key: Key
    track: Track
    launched: int
    lands: int
    since: Work
    members: int
    weight: float
    snapshot: Snapshot | None
    sent: Tree | None = None
    outcome: Landed | Lost | None = None


@dataclass
class SyncState:
    """Anchors, outer and codec states, round counts, signals, membership, work done, and the queue in flight.

    Args: model: the live tensors are its own; strategy; membership: who takes part.
    Attributes: due: the next step at which there is something to do, be it to look whether something has come; awaited:
    the same for whoever is told when it has.
    """

    model: nn.Module
    strategy: Strategy
    membership: Membership
    work: Work = Work(0, 0)
    signals: dict[str, float] = field(default_factory=dict[str, float])
    own_signals: dict[str, float] = field(default_factory=dict[str, float])
    queue: list[InFlight] = field(default_factory=list[InFlight])
    due: int = NEVER
    awaited: int = NEVER

    def __post_init__(self) -> None:
        tensors = trainable(self.model)
        # a mask of infinities has no mean; like an integer buffer it stays as it is
        buffers = {name: buffer for name, buffer in averaged_buffers(self.model).items() if buffer.isfinite().all()}
        specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
        parts = self.strategy.parts(specs)
        anchored = any(rule.carry is not Carry.GRADIENT for rule in self.strategy.rules)
        self.fragments = [
            _fragment(index, turn, layout_of(specs, names), [tensors[name] for name in names], anchored)
            for index, (turn, names) in enumerate(parts)
        ]
        self._buffers_at = -1
        rules = [(rule, list(self.fragments)) for rule in self.strategy.rules]
        buffer_rule = self.strategy.buffer_rule()
        if buffers and buffer_rule:
            self._buffers_at = len(parts)
            layout = Layout.of(spec_of(name, buffer) for name, buffer in buffers.items())
            self.fragments.append(_fragment(len(parts), 0, layout, list(buffers.values()), anchored=True))
            rules.append((buffer_rule, self.fragments[-1:]))
        self.tracks = [
            Track(
                index,
                rule,
                fragment,
                rule.outer.init(fragment.layout) if rule.outer else {},
                rule.codec.init(message(rule, fragment.layout)),
            )
            for index, (rule, served) in enumerate(rules)
            for fragment in served
            if rule.only is None or fragment.turn in rule.only
        ]
        self.fingerprint = self._fingerprint(specs)
        self.plan()

    @property
    def step(self) -> int:
        """Inner steps done."""
        return self.work.steps

    def gradient_tracks(self) -> list[Track]:
        """Tracks that act before the inner step that comes next."""
        return [track for track in self.tracks if track.rule.carry is Carry.GRADIENT]

    def plan(self) -> None:
        """Set when each track is next due, and the first step at which anything is: until then `after_step` has
        nothing to do."""
        for track in self.tracks:
            track.due = track.rule.schedule.next(self.step, track.fragment.turn, self.signals)
        due = [track.due for track in self.tracks if track.rule.carry is not Carry.GRADIENT]
        awaited = [entry for entry in self.queue if not isinstance(entry.track.rule.landing, OnArrival)]
        self.awaited = min(due + [max(entry.lands, self.step + 1) for entry in awaited], default=NEVER)
        self.due = self.awaited if len(awaited) == len(self.queue) else self.step + 1

    def note(self, signals: Mapping[str, float]) -> None:
        """Take up signals that need no agreement: all workers hold them alike, or they are this worker's own."""
        self.signals.update(signals)
        self.plan()

    def look_again(self) -> None:
        """Find live tensors again that have another place in memory than when they were last seen: a module may
        assign a new tensor to a buffer, a user may move the model.

        Raises: ModelError if a tensor has changed its shape, dtype or memory layout.
        """
        for fragment in self.fragments:
            specs = fragment.layout.specs
            if fragment.index == self._buffers_at:
                fragment.tensors = [self.model.get_buffer(spec.name) for spec in specs]
            if not fragment.live.shows(fragment.tensors):
                if changed := [
                    spec.name
                    for spec, tensor in zip(specs, fragment.tensors, strict=True)
                    if spec_of(spec.name, tensor) != spec
                ]:
                    raise ModelError(
                        f"{changed[0]!r} has another shape, dtype or memory layout than when the run began; change the "
                        "model before it is handed over"
                    )
                fragment.live = Live(fragment.layout, fragment.tensors)

    def lands(self, track: Track) -> int:
        """The step at which an exchange of this track that leaves now is used, or first looked for."""
        match track.rule.landing:
            case After(steps):
                return self.step + steps
            case OnArrival():
                return self.step + 1
            case Blocking():
                return self.step

    def shared(self, anchors: Sequence[Tree | None] | None = None) -> Iterator[tuple[str, Tensor]]:
        """The shared model by name: anchors where the strategy has them, else live; frozen parameters and local
        buffers as they are.

        Args: anchors: by fragment, where the shared model is not this worker's: see `atoll.sync.shared`.

        On an island of several lanes, tensors are whole again as `DTensor`s over the lanes.
        """
        placed = {spec.name for fragment in self.fragments for spec in fragment.layout.specs}
        unplaced = frozen(self.model) | averaged_buffers(self.model)
        yield from ((name, tensor) for name, tensor in unplaced.items() if name not in placed)
        for fragment, anchor in zip(self.fragments, anchors or self.anchors(), strict=True):
            anchored = anchor.named() if anchor else ((spec.name, None) for spec in fragment.layout.specs)
            for (name, values), live in zip(anchored, fragment.tensors, strict=True):
                yield name, live if values is None else beside(values, live)

    def anchors(self) -> list[Tree | None]:
        """This worker's anchors by fragment."""
        return [fragment.anchor for fragment in self.fragments]

    def digest(self, anchors: Sequence[Tree | None] | None = None) -> str:
        """sha256 of the shared model (collective over an island's lanes)."""
        return digest(self.shared(anchors), whole)

    def _fingerprint(self, specs: tuple[Spec, ...]) -> str:
        """What peers must have in common: the strategy, and the model's names, shapes and values, frozen ones included.

        Live may have another dtype on each: anchors are of one, and messages with them.
        """
        values = dict(trainable(self.model)) | frozen(self.model) | averaged_buffers(self.model)
        form = [replace(spec, dtype=torch.promote_types(spec.dtype, torch.float32)) for spec in specs]
        return sha256(f"{self.strategy!r};{form!r};{digest(values, _wide)}".encode()).hexdigest()[:16]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the state by a name that is stable across runs, by reference."""
        for fragment in self.fragments:
            if fragment.anchor:
                yield f"anchor.{fragment.index}", fragment.anchor.flat
        for track in self.tracks:
            for kind, state in (("outer", track.outer), ("codec", track.codec)):
                for name, tensor in state.items():
                    yield f"{kind}.{track.rule_index}.{track.fragment.index}.{name}", tensor
        for entry in self.queue:
            name = ".".join(map(str, entry.key))
            if entry.snapshot:
                yield f"queue.{name}", entry.snapshot.tree.flat
            if entry.sent:
                yield f"sent.{name}", entry.sent.flat

    def meta(self) -> dict[str, Any]:
        """Everything of the state that is not a tensor, as JSON-able values. Exchanges in flight must have been
        collected (`settle`), but for those that wait for a keeper, which are handed in again."""
        return {
            "strategy": repr(self.strategy),
            "model": self._form(),
            "work": list(self.work),
            "signals": [self.signals, self.own_signals],
            "tracks": [[track.round, track.updates, list(track.launched)] for track in self.tracks],
            "queue": [
                {
                    "key": list(entry.key),
                    "launched": entry.launched,
                    "lands": entry.lands,
                    "since": list(entry.since),
                    "members": entry.members,
                    "weight": entry.weight,
                    "landed": isinstance(entry.outcome, Landed),
                }
                | {"outcome": asdict(entry.outcome) if entry.outcome else None}
                for entry in self.queue
            ],
        }

    def load(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take up where a saved state stopped.

        Raises: CheckpointError if it is the state of another strategy or model, or tensors are missing.
        """
        if meta["strategy"] != repr(self.strategy):
            raise CheckpointError(
                f"the checkpoint was written by {meta['strategy']} but this run is {self.strategy!r}; resume with its "
                "own method"
            )
        if meta["model"] != self._form():
            raise CheckpointError(
                "the checkpoint was written with a model whose parameters differ from this one's in name, shape, dtype "
                "or memory layout; resume with its own model"
            )
        by_place = {(track.rule_index, track.fragment.index): track for track in self.tracks}
        self.queue = [
            _taken_up(saved, by_place[saved["key"][0], saved["key"][1]], Key(*saved["key"])) for saved in meta["queue"]
        ]
        awaited = {".".join(map(str, entry.key)) for entry in self.queue if not entry.outcome}
        for name, target in self.tensors():
            source = tensors.get(name)
            if source is None and name.partition(".")[2] in awaited:
                continue  # the answer will be written over it
            if source is None or source.shape != target.shape or source.dtype != target.dtype:
                seen = "nothing" if source is None else f"{tuple(source.shape)} of {source.dtype}"
                raise CheckpointError(
                    f"the checkpoint has {seen} where this run needs {name} with {tuple(target.shape)} of "
                    f"{target.dtype}; it is damaged, resume from the one before it"
                )
            target.copy_(source)
        self.work = Work(*meta["work"])
        self.signals, self.own_signals = (dict(signals) for signals in meta["signals"])
        for track, (round_, updates, launched) in zip(self.tracks, meta["tracks"], strict=True):
            track.round, track.updates, track.launched = round_, updates, Work(*launched)
        self.plan()

    def take_over(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Stand where another worker stands, whose `meta` and `tensors` these are: its anchors, outer state, counts,
        and what it has in flight. What that holds is missing where nothing has come of it yet.

        Live is the anchor. The share of the data stays this worker's, what a codec remembers begins anew, and what a
        keeper has yet to answer is the other's.
        """
        share = self.work.share
        self.load(meta, tensors)
        self.work = self.work._replace(share=share)
        self.queue = [entry for entry in self.queue if entry.outcome or not entry.track.rule.kept]
        for track in self.tracks:
            for tensor in track.codec.values():
                tensor.zero_()
        for fragment in self.fragments:
            if fragment.anchor:
                fragment.live.adopt(fragment.anchor)
        self.plan()

    def _form(self) -> str:
        """What a state must have in common with a model to be its own: its fragments' tensors, all but their values."""
        specs = [fragment.layout.specs for fragment in self.fragments]
        return sha256(repr(specs).encode()).hexdigest()[:16]


def _taken_up(saved: Mapping[str, Any], track: Track, key: Key) -> InFlight:
    """An exchange in flight as it was saved, its tensors still to be filled."""
    outcome: Landed | Lost | None = None
    if saved["outcome"]:
        record: dict[str, Any] = dict(saved["outcome"]) | {"key": key}
        if saved["landed"]:
            record |= {name: tuple(record[name]) for name in ("peers", "norms", "weights", "refused", "dropped")}
        outcome = Landed(**record) if saved["landed"] else Lost(**record)
    return InFlight(
        key,
        track,
        saved["launched"],
        saved["lands"],
        Work(*saved["since"]),
        saved["members"],
        saved["weight"],
        Snapshot(Tree(track.message)),
        Tree(track.message) if track.remembers else None,
        outcome,
    )


def message(rule: Rule, layout: Layout) -> Layout:
    """The layout of what a rule sends of a fragment."""
    return replace(layout, parts=2) if rule.carry is Carry.BOTH else layout


def _fragment(index: int, turn: int, layout: Layout, tensors: list[Tensor], anchored: bool) -> Fragment:
    live = Live(layout, tensors)
    return Fragment(index, turn, layout, tensors, live, live.copied() if anchored else None)


def _wide(tensor: Tensor) -> Tensor:
    """This lane's values in the dtype of an anchor."""
    values = local(tensor)
    return values.to(torch.promote_types(values.dtype, torch.float32)) if values.is_floating_point() else values
