"""What passes between a worker's flow and its group of peers: two effects, their answers, and the protocols of both
sides.

    flow   yields  Post(key, to, source, codec, fold, weight, ...)   -> Key (the ticket), answered at once
           yields  Take(ticket, sink)                                -> Landed | Lost, waits
           yields  Take(ticket, poll=True)                           -> Landed | Lost | None, looks
    group  answers; encoding, moving, decoding and summing happen in it, chunk by chunk

A keeper's flow (`atoll.sync.keeping`) has two more: `Collect` for what workers handed in, and `Reply`.

A `Post` carries a source and its codec, not bytes. The source of an overlapped exchange is a `Snapshot`, given away:
the group writes the result over it. The source of a blocking exchange reads live tensors, which stand still meanwhile;
its result is handed chunk by chunk to the `Take`'s sink, so that neither delta nor mean is ever held whole (ADR 1).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, Protocol

from torch import Tensor

from atoll.trees import Layout, State, Tree

ABSURD = 10.0
"""A contribution whose norm is this many times the median of the round is refused, if at least `ENOUGH` take part."""
ENOUGH = 4


class Key(NamedTuple):
    """What an exchange is called: by round, never by step. It is also the ticket that a `Post` is answered with."""

    rule: int
    fragment: int
    round: int
    lane: int = 0


KEEPER = -1
"""The worker number of a keeper: a message to it alone is answered by `Reply`."""


@dataclass(frozen=True)
class Membership:
    """Who takes part: the numbered epoch, the worker numbers in ascending order, and which one (and which of its
    lanes) this is."""

    workers: tuple[int, ...]
    me: int
    epoch: int = 0
    lane: int = 0
    lanes: int = 1


class Codec(Protocol):
    """How values are written on the wire. `block`: elements that must stay together; a wire can be cut at block
    boundaries."""

    @property
    def block(self) -> int: ...

    def init(self, layout: Layout) -> State:
        """State carried from round to round (empty for most): flat tensors with one entry per element."""
        ...

    def encode(self, values: Tensor, STATE: State) -> Tensor:
        """The wire of a run of elements: 1-D uint8, `nbytes(len(values), values.dtype)` long; may share memory with
        `values`."""
        ...

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """The values back, 1-D and as many as in `like`, ready to be added to it; may share memory with `wire`."""
        ...

    def restore(self, wire: Tensor, STATE: State) -> None:
        """Take back a wire that did not count: what it held is sent again later, if the codec has a memory."""
        ...

    def at(self, round: int) -> "Codec":
        """The codec of one round: itself, but for those that draw random numbers."""
        ...

    def nbytes(self, numel: int, itemsize: int) -> int:
        """Exact bytes on the wire of `numel` elements whose own dtype has `itemsize` bytes."""
        ...


@dataclass(frozen=True)
class Keep:
    """Every wire comes to every member as it was sent; each decodes and sums in worker order. (M-1) w bytes sent per
    worker."""


@dataclass(frozen=True)
class Reduce:
    """Each member owns 1/M of the elements, sums what it receives in worker order, divides once, and returns the mean
    in `result`.

    About (M-1)/M (w + r) bytes sent per worker, for wires of w bytes and results of r. Everybody, the owner too, uses
    the decoded result.
    """

    result: Codec


@dataclass(frozen=True)
class Sum:
    """The backend's own all-reduce over uncoded values, for clusters: no promise of identical bits, the codec must be
    `exact`."""


Fold = Keep | Reduce | Sum


class Source(Protocol):
    """The values of a fragment that a worker contributes, read chunk by chunk."""

    @property
    def layout(self) -> Layout: ...

    def read(self, start: int, out: Tensor) -> Tensor:
        """The chunk at `start`, in `out` or in memory of the source's own; the caller leaves it untouched."""
        ...


class Snapshot:
    """Values at the moment of launch, given to the group: the result is written over them as it arrives."""

    def __init__(self, tree: Tree, ready: Callable[[], None] = lambda: None) -> None:
        self.tree = tree
        self.layout = tree.layout
        self._ready = ready

    def read(self, start: int, out: Tensor) -> Tensor:
        """A view of the chunk; waits until an asynchronous copy from a device has arrived."""
        self._ready()
        return self.tree.flat[start : start + len(out)]

    def write(self, start: int, values: Tensor) -> None:
        """Replace the chunk by what came back."""
        self.tree.flat[start : start + len(values)].copy_(values)


@dataclass(frozen=True)
class Post:
    """Send `source` to the members `to` (this one included), to be combined by `fold` with `weight`.

    `quorum`: the part of the members' contributions that must exceed it, or the round does not count. `signals`: a few
    floats whose mean over the members is agreed along the way. `edges`: who hears whom, everyone if None. A post is
    idempotent until it is taken: a key that was answered before is answered the same again.
    """

    key: Key
    to: tuple[int, ...]
    source: Source
    codec: Codec
    codec_state: State
    fold: Fold
    weight: float
    quorum: float
    signals: Mapping[str, float]
    edges: "Edges | None" = None


@dataclass(frozen=True)
class Edges:
    """Who hears whom in a meeting where not everyone hears everyone; only with `Keep`.

    Args: hears: the members whose contributions form this worker's mean, itself included, ascending. tells: those that
    get this worker's wire, without itself.
    """

    hears: tuple[int, ...]
    tells: tuple[int, ...]


@dataclass(frozen=True)
class Take:
    """Wait for the exchange `ticket`, or only look. `sink(landed, start, mean)` gets every chunk of a blocking
    exchange, and may overwrite `mean`."""

    ticket: Key
    sink: "Callable[[Landed, int, Tensor], None] | None" = None
    poll: bool = False


@dataclass(frozen=True)
class Landed:
    """A round that counts. Whose contributions are in it was agreed before any of its values were handed out.

    Args:
        peers: the workers whose contributions are in the mean, ascending; share: their part of those asked.
        signals: the agreed means. norms, weights: of each accepted contribution, in the order of `peers`: its L2 norm
        as it was seen after the wire, and w_m.
        mean_norm: L2 norm of their mean (nan until the last chunk has come). refused: a sentence for each that was
        refused. sent: bytes this worker handed to the link. age: inner steps from launch to landing. update: how many
        landings this fragment has had under its rule, this one included. anchor: the mean of the members' anchors, for
        the chunk that an outer optimizer is given, where they were sent. dropped: asked, but not heard in time.
    """

    key: Key
    peers: tuple[int, ...]
    share: float
    signals: Mapping[str, float] = field(default_factory=dict[str, float])
    norms: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    mean_norm: float = math.nan
    refused: tuple[str, ...] = ()
    sent: int = 0
    age: int = 0
    update: int = 0
    anchor: Tensor | None = None
    dropped: tuple[int, ...] = ()

    @property
    def cosine(self) -> float:
        """Mean cosine between two workers' contributions, each pair weighted by the product of its norms and weights.

        `sum_{i != j} c_i . c_j / sum_{i != j} |c_i| |c_j|` with `c_i = w_i d_i`, from norms alone: the numerator is
        `W^2 |mean|^2 - sum |c_i|^2` with `W = sum w_i`. nan for one.
        """
        weights = self.weights or (1.0,) * len(self.norms)
        parts = [weight * norm for weight, norm in zip(weights, self.norms, strict=True)]
        squares = sum(part * part for part in parts)
        pairs = sum(parts) * sum(parts) - squares
        total = sum(weights) * self.mean_norm
        return (total * total - squares) / pairs if len(parts) > 1 and pairs > 0 else math.nan


@dataclass(frozen=True)
class Lost:
    """A round that does not count: live, anchor and outer state stay as they are, and the next delta holds what was
    learned meanwhile."""

    key: Key
    why: str


@dataclass(frozen=True)
class Push:
    """What a worker handed in to a keeper. `values` belongs to the keeper from now on; `norm` is theirs, finite."""

    key: Key
    worker: int
    weight: float
    norm: float
    values: Tree


@dataclass(frozen=True)
class Collect:
    """A keeper's look: what was handed in since the last one for `fragment` under `rule`, in order of arrival."""

    rule: int
    fragment: int


@dataclass(frozen=True)
class Reply:
    """A keeper's answer to one push: what it held counts in `landed`, and `values` is what the worker gets."""

    push: Push
    landed: Landed
    values: Tree


@dataclass(frozen=True)
class Launched:
    """For the record: an exchange left at inner step `step`."""

    key: Key
    step: int


Event = Launched | Landed | Lost


class PeerGroup(Protocol):
    """One worker's way to the others. All groups pass one conformance suite
    (`atoll.testing.conformance.check_peer_group`)."""

    @property
    def membership(self) -> Membership: ...

    def agree(self, fingerprint: str) -> None:
        """Make sure that all members train the same thing; raises `GroupError` with both sides shown."""
        ...

    def post(self, post: Post) -> Key:
        """Start an exchange; never waits for a peer."""
        ...

    def take(self, take: Take, wait: bool = True) -> Landed | Lost | None:
        """The answer of an exchange; None if it is not there yet and `wait` is False."""
        ...

    def abort(self) -> None:
        """Wake everyone who waits in this group with a `GroupError`."""
        ...


class KeeperGroup(Protocol):
    """A keeper's way to its workers."""

    def collect(self, collect: Collect) -> Sequence[Push]:
        """What has come; never waits."""
        ...

    def reply(self, reply: Reply) -> None:
        """Answer one push."""
        ...


def absurd(norms: Sequence[float]) -> float:
    """The norm over which a contribution is refused: ten times the median of a round of at least four, else none."""
    return ABSURD * median(norms) if len(norms) >= ENOUGH else math.inf


def pieces(start: int, stop: int, members: int, block: int) -> Iterator[tuple[int, int]]:
    """The [first, last) range of a chunk that each member owns under `Reduce`, in member order, cut at block
    boundaries."""
    size = math.ceil(math.ceil((stop - start) / members) / block) * block
    for index in range(members):
        yield min(start + index * size, stop), min(start + (index + 1) * size, stop)


def bytes_sent(
    fold: Fold,
    codec: Codec,
    layout: Layout,
    members: int,
    index: int,
    *,
    refused: bool = False,
    told: int | None = None,
) -> int:
    """Bytes that member number `index` of `members` hands to the link in one exchange of a fragment, headers not
    counted.

    Args: refused: whether its contribution does not count. It is not sent then, but the mean of the elements that the
        member owns is, and an all-reduce needs everyone. told: members that get its wire under `Keep`, if not all.
    """
    item, total = layout.dtype.itemsize, 0
    told = members - 1 if told is None else told
    for length, count in layout.lengths.items():
        wire, sent = codec.nbytes(length, item), 0
        match fold:
            case Keep():
                sent = 0 if refused else told * wire
            case Reduce(result):
                owned = list(pieces(0, length, members, math.lcm(codec.block, result.block)))
                first, last = owned[index]
                if not refused:
                    sent = sum(codec.nbytes(b - a, item) for at, (a, b) in enumerate(owned) if at != index)
                sent += (members - 1) * result.nbytes(last - first, item)
            case Sum():
                sent = 2 * (members - 1) * wire // members
        total += sent * count
    return total
