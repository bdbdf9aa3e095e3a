"""Mixers: with whom a message meets, with what weight, and how what comes back is combined.

`exchange` is a pure function of membership, round and work done, so all peers derive the same meeting without a
message.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from atoll.errors import CompositionError
from atoll.parts.codecs import exact
from atoll.parts.codecs.nested import remembers
from atoll.trees import Layout
from atoll.wire import Codec, Edges, Fold, Keep, Membership, Reduce, bytes_sent


class Work(NamedTuple):
    """What a worker did since the fragment last left for a round that counted: inner steps and tokens; and its part of
    all the data, on average 1."""

    steps: int
    tokens: int
    share: float = 1.0


class Situation(NamedTuple):
    """What a meeting is derived from: who takes part, which round it is, what this worker did for it, the signals that
    all agree on, and what is sent."""

    membership: Membership
    round: int
    work: Work
    signals: Mapping[str, float]
    codec: Codec
    layout: Layout


class Exchange(NamedTuple):
    """Members that meet (ascending, this worker included), how they combine, this worker's weight, and who hears whom
    (everyone, if None)."""

    to: tuple[int, ...]
    fold: Fold
    weight: float
    edges: Edges | None = None


class Mixer(Protocol):
    """With whom, and how."""

    @property
    def agrees(self) -> bool:
        """Whether all members get the same."""
        ...

    def exchange(self, at: Situation) -> Exchange: ...


@dataclass(frozen=True)
class all_mean:
    """The mean over all members: (1/M) sum_m x_m, one ordered sum and one division.

    Without `fold`, the way with fewer bytes: `Keep()` while M < 1 + r/w, else `Reduce(exact())`, for wires of w bytes
    and exact results of r. Both give the same bits.
    """

    fold: Fold | None = None

    def __post_init__(self) -> None:
        if isinstance(self.fold, Reduce) and remembers(self.fold.result):
            raise CompositionError(
                f"the means of {self!r} were to come back by a codec with a memory, but a member has none of what "
                "others wrote back before; write Reduce(...) with the codec inside of it"
            )

    @property
    def agrees(self) -> bool:
        """Everyone adds up alike."""
        return True

    def exchange(self, at: Situation) -> Exchange:
        """Everyone, with weight 1."""
        workers = at.membership.workers
        return Exchange(workers, self.fold or cheaper(at.codec, at.layout, len(workers)), 1.0)


@dataclass(frozen=True)
class alone:
    """No meeting: each worker goes on with its own contribution. For control experiments; nothing is sent."""

    @property
    def agrees(self) -> bool:
        """Nobody hears of the others."""
        return False

    def exchange(self, at: Situation) -> Exchange:
        """This worker only."""
        return Exchange((at.membership.me,), Keep(), 1.0)


@dataclass(frozen=True)
class weighted:
    """Contributions of `mixer` weighted by `by(work)`: sum_m w_m x_m / sum_m w_m.

    DiLoCo weighs deltas by the examples in each shard when data differ (section 1.3): `by_share`. `by_tokens` weighs
    by tokens trained.
    """

    by: Callable[[Work], float]
    mixer: Mixer

    @property
    def agrees(self) -> bool:
        """As the inner mixer."""
        return self.mixer.agrees

    def exchange(self, at: Situation) -> Exchange:
        """The inner mixer's meeting with our weight."""
        return self.mixer.exchange(at)._replace(weight=float(self.by(at.work)))


@dataclass(frozen=True)
class by_tokens:
    """Weight = tokens trained since the fragment last left for a round that counted: those that made the delta."""

    def __call__(self, work: Work) -> float:
        return work.tokens


@dataclass(frozen=True)
class by_share:
    """Weight = the worker's part of all the data (1 on average)."""

    def __call__(self, work: Work) -> float:
        return work.share


@dataclass(frozen=True)
class unrounded:
    """The meetings and weights of `mixer`, with the mean as it is: no narrow `result` on the way back."""

    mixer: Mixer

    @property
    def agrees(self) -> bool:
        """As the inner mixer."""
        return self.mixer.agrees

    def exchange(self, at: Situation) -> Exchange:
        """The inner mixer's meeting, a `Reduce` with an exact result."""
        meeting = self.mixer.exchange(at)
        return meeting._replace(fold=Reduce(exact())) if isinstance(meeting.fold, Reduce) else meeting


def cheaper(codec: Codec, layout: Layout, members: int) -> Fold:
    """`Keep()` or `Reduce(exact())`, whichever sends fewer bytes; `Reduce` on a tie, because it also receives fewer."""
    reduce = Reduce(exact())
    keep = Keep()
    return (
        keep if bytes_sent(keep, codec, layout, members, 0) < bytes_sent(reduce, codec, layout, members, 0) else reduce
    )
