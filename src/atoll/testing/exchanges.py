"""Exchanges of the conformance suite of peer groups, and one member's side of them."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from atoll.parts.codecs import cast, exact, random_mask
from atoll.sync.flow import Answer, Effect
from atoll.trees import Layout, Spec, Tree
from atoll.wire import Codec, Fold, Key, Landed, Lost, Membership, Post, Reduce, Snapshot, Take

Script = Generator[Effect, Answer, tuple[Landed | Lost, Tensor]]
HALF = cast(torch.float16)


@lru_cache(maxsize=32)
def _normal(worker: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * worker + numel)
    return torch.randn(numel, generator=generator, dtype=dtype)


@dataclass
class Held:
    """A source that stands still, and what its sink was given."""

    layout: Layout
    flat: Tensor
    result: Tensor = field(init=False)
    starts: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.result = torch.full_like(self.flat, -1.0)

    def read(self, start: int, out: Tensor) -> Tensor:
        return out.copy_(self.flat[start : start + len(out)])

    def sink(self, landed: Landed, start: int, mean: Tensor) -> None:
        self.result[start : start + len(mean)] = mean
        self.starts.append(start)
        mean.zero_()  # a sink may do so


@dataclass(frozen=True)
class Case:
    """One exchange: who meets, what each sends (by worker), and how it is combined."""

    numel: int
    fold: Fold = Reduce(exact())
    codec: Codec = exact()
    dtype: torch.dtype = torch.float32
    overlapped: bool = False
    weights: Mapping[int, float] = field(default_factory=dict[int, float])
    scale: Mapping[int, float] = field(default_factory=dict[int, float])
    quorum: float = 0.5
    signals: Mapping[str, float] = field(default_factory=dict[str, float])
    parts: int = 1

    @property
    def layout(self) -> Layout:
        """Of the message."""
        return replace(Layout.of([Spec("values", (self.numel,), (1,), self.dtype)]), parts=self.parts)

    def values(self, worker: int) -> Tensor:
        """What `worker` contributes: normal values times its scale (nan makes all of them nan)."""
        return _normal(worker, self.numel * self.parts, self.dtype) * self.scale.get(worker, 1.0)

    def seen(self, worker: int) -> Tensor:
        """The same after its wire. A mask is read for one chunk."""
        values = self.values(worker)
        if isinstance(self.codec, random_mask):
            return torch.where(self.codec.mask(len(values)), values, 0.0)
        return values.half().to(self.dtype) if self.codec == HALF else values

    def mean(self, workers: Sequence[int]) -> Tensor:
        """The mean over `workers` in their order, by a plain loop."""
        seen = [self.seen(worker) for worker in workers]
        weights = [self.weights.get(worker, 1.0) for worker in workers]
        total = seen[0] * weights[0]
        for values, weight in zip(seen[1:], weights[1:], strict=True):
            total = total + values * weight
        mean = total / sum(weights)
        return mean.half().to(self.dtype) if self.fold == Reduce(HALF) else mean


@dataclass
class Member:
    """One member's side of a script: it numbers exchanges alike on all members."""

    membership: Membership
    rule: int
    round: int = 0

    @property
    def me(self) -> int:
        return self.membership.me

    @property
    def everyone(self) -> tuple[int, ...]:
        return self.membership.workers

    def post(self, case: Case, to: tuple[int, ...] | None = None) -> tuple[Post, "Held | Snapshot"]:
        layout, values = case.layout, case.values(self.me)
        source = Snapshot(Tree(layout, values)) if case.overlapped else Held(layout, values)
        key = Key(self.rule, 0, self.round, self.membership.lane)
        self.round += 1
        weight = case.weights.get(self.me, 1.0)
        signals = {name: value + self.me for name, value in case.signals.items()}
        return Post(key, to or self.everyone, source, case.codec, {}, case.fold, weight, case.quorum, signals), source

    def exchange(self, case: Case, to: tuple[int, ...] | None = None) -> Script:
        """The whole of one exchange: the answer, and what was written (the values sent, if nothing was)."""
        post, source = self.post(case, to)
        key = yield post
        assert key == post.key, f"a post of {post.key} was answered with the ticket {key}"
        return (yield from self.taken(post, source))

    def taken(self, post: Post, source: "Held | Snapshot") -> Script:
        outcome = yield Take(post.key, source.sink if isinstance(source, Held) else None)
        assert isinstance(outcome, Landed | Lost)
        assert outcome.key == post.key
        if isinstance(source, Snapshot):
            return outcome, source.tree.flat
        if isinstance(outcome, Landed):
            assert source.starts == [start for start, _ in source.layout.chunks], "each chunk comes once, in order"
            return outcome, source.result
        assert not source.starts, "nothing of a round that does not count is handed out"
        return outcome, source.flat
