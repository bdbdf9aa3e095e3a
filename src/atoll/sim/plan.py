"""What a method would cost on a network, before anything is rented: from simulated events, without training."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from atoll.parts.gossip import only, pairs
from atoll.parts.landings import After, OnArrival
from atoll.parts.mixers import all_mean, alone, unrounded, weighted
from atoll.parts.schedules import every, staggered
from atoll.sim.faults import Restarts
from atoll.sim.network import Between, Island, Network
from atoll.sim.pace import Pace
from atoll.sim.run import Job, simulate
from atoll.sim.trace import Trace
from atoll.sim.world import HOST
from atoll.sync.checks import nested
from atoll.sync.rule import Rule, Strategy
from atoll.trees import Spec

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Utilisations that a bandwidth is looked for."""
ALIKE, JITTERED, UNLIKE, FAILING = (2, 2), (4, 12), (8, 24), (2, 200)
"""Rounds that are simulated first, while what is overlapped fills the link, and then counted: where rounds repeat;
where they do but for jitter; where they do not; and where collectives fail, of which a mean is wanted."""
AWAITED, ENOUGH = (8, 64, 256), 8
"""Rounds to simulate where nobody waits: more, unless they are this many times as long as results take to come."""
NEAR, FAR = 4, 1e9
"""Of the bandwidth that full speed would fill, a part at which there is much waiting; and a part or a multiple that is
as good as none or infinite."""


@dataclass(frozen=True)
class Setting:
    """Islands that are alike but for the jitter of their steps, each with a link of its own.

    Args: specs: of the model's parameters. workers: islands. step_s: seconds of an inner step. bandwidth: bits per
    second of each island's link, in each direction. latency: seconds one way. jitter: standard deviation of a step's
    duration, as a part of it. seed: of the jitter. failing: probability that each link of a collective of more than two
    fails, which then begins again.
    """

    specs: tuple[Spec, ...]
    workers: int
    step_s: float
    bandwidth: float = math.inf
    latency: float = 0.0
    jitter: float = 0.0
    seed: int = 0
    failing: float = 0.0

    def network(self) -> Network:
        """Every island at a site of its own."""
        islands = (
            Island(f"site {worker}", self.bandwidth, self.bandwidth, self.step_s, self.jitter)
            for worker in range(self.workers)
        )
        return Network(tuple(islands), elsewhere=Between(latency=self.latency))

    def trace(self, strategy: Strategy, period: int, warm: int, rounds: int, *, keeps: bool = False) -> Trace:
        """Simulated rounds, of which the first `warm` do not count in the utilisation."""
        job = Job(strategy, self.specs, period * (warm + rounds), warm=period * warm)
        restarts = Restarts(self.failing, self.seed) if self.failing else None
        return simulate(job, self.network(), pace=Pace(self.seed), restarts=restarts, keeps=keeps)


@dataclass(frozen=True)
class Exchanged:
    """How often what nobody waits for comes about. Args: share: exchanges begun, as a part of those that were due. age:
    mean inner steps from leaving to landing, infinite if nothing landed (then share is a bound)."""

    share: float
    age: float


@dataclass(frozen=True)
class Planned:
    """What a method costs in a setting.

    Args: utilisation: part of the time that islands train. step_s: mean seconds from one inner step to the next,
    waiting included. nbytes: that a worker sends in one inner step, on average. period: inner steps of a round. needed:
    bits per second that reach each of `TARGETS`: 0 where any link does, None where none does. exchanged: how often
    rounds come about, where nobody waits for them.
    """

    method: str
    utilisation: float
    step_s: float
    nbytes: float
    period: int
    needed: Mapping[float, float | None]
    exchanged: Exchanged | None = None


def unawaited(strategy: Strategy) -> bool:
    """Whether nobody ever waits for an exchange, so that slow links cost rounds and no time."""
    return bool(strategy.rules) and all(isinstance(rule.landing, OnArrival) for rule in strategy.rules)


def _rounds(strategy: Strategy, period: int, setting: Setting) -> tuple[int, int]:
    """How many rounds to leave out, and how many to count."""
    if setting.failing:
        return FAILING
    if not all(_repeats(rule, period, setting) for rule in strategy.rules):
        return UNLIKE
    return JITTERED if setting.jitter else ALIKE


def _repeats(rule: Rule, period: int, setting: Setting) -> bool:
    """Whether a rule's exchanges are alike in all rounds: everyone meets, and one has landed when the next leaves."""
    everyone = (all_mean, alone, weighted, unrounded, only, *([] if setting.workers % 2 else [pairs]))
    return (
        isinstance(rule.schedule, every | staggered)
        and all(isinstance(mixer, everyone) for mixer in nested(rule.mixer))
        and not isinstance(rule.landing, OnArrival)
        and not (isinstance(rule.landing, After) and rule.landing.steps > period // _turns(rule))
    )


def _turns(rule: Rule) -> int:
    """How often something leaves in a round."""
    return rule.schedule.fragments if isinstance(rule.schedule, staggered) else 1


def utilisation(strategy: Strategy, period: int, setting: Setting) -> tuple[float, float, float]:
    """Part of the time that islands train; seconds from step to step; bytes that a worker sends per step.

    Args: period: inner steps of a round, of which whole ones are simulated.
    """
    return (*used(strategy, period, setting), sent(strategy, period, setting))


def sent(strategy: Strategy, period: int, setting: Setting) -> float:
    """Bytes that a worker sends in one inner step, on average over workers and a round, if no exchange is left out."""
    warm, rounds = ALIKE
    free = replace(setting, bandwidth=math.inf, latency=0.0, jitter=0.0, failing=0.0)
    before, after = (sum(free.trace(strategy, period, 0, count).sent) for count in (warm, warm + rounds))
    return (after - before) / (setting.workers * rounds * period)


def used(strategy: Strategy, period: int, setting: Setting) -> tuple[float, float]:
    """Part of the time that islands train, and mean seconds from one inner step to the next.

    Exchanges that overlap one another can fill a link over hundreds of rounds before anyone waits. In the end it
    carries no more than its bandwidth, so that bounds what the rounds that were simulated say.
    """
    warm, rounds = _rounds(strategy, period, setting)
    trace = setting.trace(strategy, period, warm, rounds)
    busy, step_s = trace.utilisation, sum(trace.compute) / (setting.workers * period * (warm + rounds))
    if (warm, rounds) == UNLIKE and not strategy.kept and setting.bandwidth < math.inf:
        needs = 8 * sent(strategy, period, setting)
        busy = min(busy, setting.bandwidth * step_s / needs) if needs else busy
    return busy, step_s / busy


def exchanged(strategy: Strategy, period: int, setting: Setting) -> Exchanged:
    """How many of the rounds that are due come about in a strategy that never waits, because a fragment leaves at its
    first turn after what left before has landed; and how old results are."""
    found = Exchanged(0.0, math.inf)
    for rounds in AWAITED:
        found = _exchanged(strategy, period, setting, rounds)
        if ENOUGH * found.age < rounds * period:
            break
    return found


def _exchanged(strategy: Strategy, period: int, setting: Setting, rounds: int) -> Exchanged:
    """The same from so many rounds, without the first quarter: every fragment's first exchange finds the link as no
    later one does. The island beside the keeper, which needs no link, is left out."""
    far = range(HOST + 1 if setting.workers > 1 else HOST, setting.workers)
    trace = replace(setting, jitter=0.0).trace(strategy, period, 0, rounds, keeps=True)
    since, until = (count * period * setting.step_s * (1 + 1e-9) for count in (rounds // 4, rounds))
    told = [each for each in trace.moments if each.island in far]
    launched = {(each.island, each.key): each.time for each in told if each.kind == "launched"}
    landed = {(each.island, each.key): each.time for each in told if each.kind == "landed"}
    due = len(far) * len(strategy.rules) * len(strategy.divide(setting.specs)) * (rounds - rounds // 4)
    share = sum(time > since for time in launched.values()) / due
    # in flight = rate of landings x age, which what has not landed yet belongs to
    count = sum(time > since for time in landed.values())
    flown = sum(max(0.0, landed.get(key, until) - max(time, since)) for key, time in launched.items())
    return Exchanged(min(1.0, share), flown / count / setting.step_s) if count else Exchanged(1 / rounds, math.inf)


@dataclass
class Curve:
    """What grows with bandwidth, from 0 to 1 at most; what is asked for twice is simulated once.

    Args: measure: by bits per second. scale: bits per second about which it changes; 0 for what sends nothing.
    """

    measure: Callable[[float], float]
    scale: float
    known: dict[float, float] = field(default_factory=dict[float, float])

    def at(self, bandwidth: float) -> float:
        """The value there."""
        if bandwidth not in self.known:
            self.known[bandwidth] = self.measure(bandwidth)
        return self.known[bandwidth]

    def reaches(self, target: float) -> float | None:
        """The bandwidth from which on the value is the target at least, to a percent; 0 if any is, None if none is."""
        if self.at(math.inf) < target:
            return None
        if not self.scale or (self.at(self.scale / NEAR) >= target and self.at(self.scale / FAR) >= target):
            return 0.0
        if self.at(self.scale * FAR) < target:
            return None
        while True:
            low = max(each for each, value in self.known.items() if value < target)
            high = min(each for each in self.known if each > low)
            if high <= 1.01 * low:
                return high
            self.at(math.sqrt(low * high))


def curve(strategy: Strategy, period: int, setting: Setting) -> Curve:
    """Utilisation by bandwidth, which replaces the setting's."""
    if unawaited(strategy):
        return Curve(lambda bandwidth: 1.0, 0.0)
    return Curve(
        lambda bandwidth: used(strategy, period, replace(setting, bandwidth=bandwidth))[0],
        8 * sent(strategy, period, setting) / setting.step_s,
    )


def needed(strategy: Strategy, period: int, setting: Setting, target: float) -> float | None:
    """The bandwidth in bits per second, to a percent, from which on a method reaches a utilisation; 0 if any does; None
    if no link is fast enough."""
    return curve(strategy, period, setting).reaches(target)


def plan(method: str, strategy: Strategy, period: int, setting: Setting) -> Planned:
    """Utilisation, time and traffic of a method, and the bandwidth that it would need.

    Raises: CompositionError if strategy and model do not fit.

    Example:
        >>> from atoll.parts.outers import nesterov
        >>> from atoll.sim.run import spec
        >>> diloco = Strategy((Rule(every(100), outer=nesterov(0.7, 0.9)),))
        >>> planned = plan("diloco", diloco, 100, Setting((spec(1e9),), workers=8, step_s=1.0, bandwidth=1e9))
        >>> round(planned.utilisation, 3), round(planned.needed[0.9] / 1e9, 1)
        (0.641, 5.1)
    """
    busy, step_s, nbytes = utilisation(strategy, period, setting)
    by_bandwidth = curve(strategy, period, setting)
    by_bandwidth.known[setting.bandwidth] = busy
    found = {target: by_bandwidth.reaches(target) for target in TARGETS}
    heard = None
    if unawaited(strategy):
        heard = exchanged(strategy, period, setting)
        nbytes *= heard.share
    return Planned(method, busy, step_s, nbytes, period, found, heard)
