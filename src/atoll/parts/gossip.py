"""Gossip: mixers in which a part of the workers meets, so that one slow or lost worker holds up few others.

Each round mixes by a doubly stochastic matrix W: the mean over all workers is kept, and the squared distance from it
shrinks, in the mean over the draws, to a part rho of itself; k rounds of random meetings leave rho^k.

    pairs              rho = (M - 2) / (2 (M - 1)), M even: 1/3 (4 workers), 3/7 (8), 7/15 (16); near 1/2 for many
    groups of g        rho = (M - g) / (g (M - 1)), M a multiple of g: 1/7 for M = 8, g = 4
    hypercube          0 after log2 M rounds, M a power of two
    exponential        0 after log2 M rounds, M a power of two; 0.047 after 3 rounds for M = 6

Random meetings are drawn by sorting the workers by sha256("seed:epoch:round:worker"): a uniform shuffle that all peers
derive alike, on every machine and version. Rules that mix the same round should have different seeds, or they meet the
same partners.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import sha256

from atoll.errors import CompositionError
from atoll.parts.mixers import Exchange, Mixer, Situation, alone, cheaper
from atoll.wire import Edges, Keep


@dataclass
class _Draw:
    """The order of a round, and everyone's place in it, for the workers it was last asked for."""

    workers: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    place: Mapping[int, int] = field(default_factory=dict[int, int])


@lru_cache(maxsize=256)
def _draw(name: str) -> _Draw:
    return _Draw()


def _shuffled(seed: int, at: Situation) -> tuple[tuple[int, ...], int]:
    """The workers in the order of the round's draw, and this worker's place; drawn once for all who ask."""
    workers, name = at.membership.workers, f"{seed}:{at.membership.epoch}:{at.round}"
    drawn = _draw(name)
    # many islands ask with one and the same tuple: it is long, and would take longer to hash than all else here
    if drawn.workers is not workers and drawn.workers != workers:
        order = sorted(workers, key=lambda worker: sha256(f"{name}:{worker}".encode()).digest())
        drawn.workers, drawn.order = workers, tuple(order)
        drawn.place = {worker: place for place, worker in enumerate(order)}
    return drawn.order, drawn.place[at.membership.me]


@dataclass(frozen=True)
class pairs:
    """A perfect matching of the workers, drawn anew each round, all matchings alike: (x_i + x_j) / 2.

    With an odd number of workers the last of the draw meets nobody this round (NoLoCo).

    Example:
        >>> from atoll.parts.mixers import Work
        >>> from atoll.parts.codecs import exact
        >>> from atoll.trees import Layout
        >>> from atoll.wire import Membership
        >>> def met(me, round):
        ...     members = Membership((0, 1, 2, 3), me)
        ...     return pairs(7).exchange(Situation(members, round, Work(1, 1), {}, exact(), Layout.of([]))).to
        >>> met(0, 5) == met(met(0, 5)[1], 5)
        True
    """

    seed: int = 0

    @property
    def agrees(self) -> bool:
        """Each pair has a mean of its own."""
        return False

    def exchange(self, at: Situation) -> Exchange:
        """This worker and its partner in the round's matching."""
        order, place = _shuffled(self.seed, at)
        first = place // 2 * 2
        return Exchange(tuple(sorted(order[first : first + 2])), Keep(), 1.0)


@dataclass(frozen=True)
class groups:
    """The workers in groups, drawn anew each round: the mean over each group.

    M workers make floor(M / size) groups, one at least, whose sizes differ by one at most: what is left over is spread,
    so that nobody meets fewer than `size` workers while there are as many. The fold is the cheaper one for the group.
    With n groups rho = (n - 1) / (M - 1), whatever their sizes.

    Args: size: workers per group, 2 at least.
    """

    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size < 2:
            raise CompositionError(
                f"groups of {self.size} were asked for, but it takes two to mix; give size >= 2, or use alone()"
            )

    @property
    def agrees(self) -> bool:
        """Each group has a mean of its own."""
        return False

    def exchange(self, at: Situation) -> Exchange:
        """This worker's group of the round."""
        order, place = _shuffled(self.seed, at)
        count = max(1, len(order) // self.size)
        to = sorted(order[place % count :: count])
        return Exchange(tuple(to), cheaper(at.codec, at.layout, len(to)), 1.0)


def _dimensions(workers: int) -> int:
    """ceil(log2 M)."""
    return (workers - 1).bit_length()


@dataclass(frozen=True)
class hypercube:
    """Worker number i of M meets i xor 2^k in round r, k = r mod ceil(log2 M): (x_i + x_j) / 2.

    Exact after log2 M rounds where M is a power of two. Elsewhere who has no such partner waits a round, and the
    distance only shrinks. A round that is lost leaves the halves of its dimension apart until it comes again; where
    links fail, `pairs` degrade more smoothly.
    """

    @property
    def agrees(self) -> bool:
        """Each pair has a mean of its own."""
        return False

    def exchange(self, at: Situation) -> Exchange:
        """This worker and its neighbour along the round's dimension."""
        workers, me = at.membership.workers, at.membership.me
        dimensions = _dimensions(len(workers))
        if not dimensions:
            return _nobody(at)
        partner = workers.index(me) ^ (1 << at.round % dimensions)
        return Exchange(tuple(sorted((me, workers[partner]))), Keep(), 1.0) if partner < len(workers) else _nobody(at)


@dataclass(frozen=True)
class exponential:
    """The one-peer exponential graph: in round r worker number i of M tells i + 2^k and hears i - 2^k (mod M),
    k = r mod ceil(log2 M): (x_i + x_{i - 2^k}) / 2.

    Directed: each link direction is used once. Exact after log2 M rounds where M is a power of two (2110.13363).
    """

    @property
    def agrees(self) -> bool:
        """Each worker has a mean of its own."""
        return False

    def exchange(self, at: Situation) -> Exchange:
        """Everyone, with this round's two edges of this worker."""
        workers, me = at.membership.workers, at.membership.me
        count, index = len(workers), workers.index(me)
        if count == 1:
            return _nobody(at)
        hop = 1 << at.round % _dimensions(count)
        heard, told = workers[(index - hop) % count], workers[(index + hop) % count]
        return Exchange(workers, Keep(), 1.0, Edges(hears=tuple(sorted((me, heard))), tells=(told,)))


@dataclass(frozen=True)
class only:
    """Mixes some parameters by `mixer`, and leaves the others as each worker's own.

    Factored Gossip DiLoCo mixes deltas on the embedding, the head and the first blocks only (section 5.1). A strategy
    cuts its fragments so that each has parameters of one kind.

    Args: names: shell-style patterns of parameter names.
    Raises: CompositionError if there is no pattern, and at a fragment that was not cut.

    Example:
        >>> only(("model.embed_tokens*", "lm_head*"), pairs(7))
        only(names=('model.embed_tokens*', 'lm_head*'), mixer=pairs(seed=7))
    """

    names: tuple[str, ...]
    mixer: Mixer

    def __post_init__(self) -> None:
        if not self.names or tuple(self.names) != self.names:
            raise CompositionError(
                f"only was given {self.names!r}, but it takes the patterns of the parameters to mix as a tuple; "
                "write only(('lm_head*',), ...)"
            )

    @property
    def agrees(self) -> bool:
        """What is not mixed stays one's own."""
        return False

    def divide(self, parameters: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The parameters that are mixed, and the others."""
        chosen = tuple(each for each in parameters if any(fnmatchcase(each, name) for name in self.names))
        return chosen, tuple(each for each in parameters if each not in chosen)

    def exchange(self, at: Situation) -> Exchange:
        """The inner mixer's meeting if the fragment matches, else this worker only."""
        chosen, others = self.divide([spec.name for spec in at.layout.specs])
        if chosen and others:
            raise CompositionError(
                f"only({self.names!r}, ...) matches {chosen[0]} but not {others[0]}, which are synced together, and a "
                "fragment meets as a whole; use a partition such as "
                f"by_name({', '.join(map(repr, (*self.names, '*')))})"
            )
        return self.mixer.exchange(at) if chosen else _nobody(at)


@dataclass(frozen=True)
class alarmed:
    """Meets by `mixer` while the alarm is on, else nobody: mixing where the workers have drifted apart.

    The alarm follows the mean Jensen-Shannon distance d between the workers' predictions, with hysteresis: on above
    `on`, off below `off`, else as it was. All workers agree on it as the signal "alarm", 1.0 or 0.0. The distance is
    the measure of Factored Gossip DiLoCo; mixing by it is ours.

    Args: on, off: thresholds of d in [0, 1], off <= on.
    """

    mixer: Mixer
    on: float
    off: float

    def __post_init__(self) -> None:
        if not 0 <= self.off <= self.on <= 1:
            raise CompositionError(
                f"alarmed was given on = {self.on} and off = {self.off}, but a Jensen-Shannon distance lies between 0 "
                "and 1 and the alarm must not end above where it starts; give 0 <= off <= on <= 1"
            )

    @property
    def agrees(self) -> bool:
        """Without alarm each worker goes on by itself."""
        return False

    def exchange(self, at: Situation) -> Exchange:
        """The inner mixer's meeting if the alarm is on."""
        return self.mixer.exchange(at) if at.signals.get("alarm", 0.0) > 0.5 else _nobody(at)

    def switch(self, was: float, js: float) -> float:
        """The alarm after a distance `js` was measured: 1.0 or 0.0.

        Example:
            >>> part = alarmed(pairs(7), on=0.4, off=0.2)
            >>> part.switch(0.0, 0.3), part.switch(0.0, 0.5), part.switch(1.0, 0.3), part.switch(1.0, 0.1)
            (0.0, 1.0, 1.0, 0.0)
        """
        if js > self.on:
            return 1.0
        return 0.0 if js < self.off else was


def _nobody(at: Situation) -> Exchange:
    return alone().exchange(at)
