"""What a method would cost on a network, before anything is rented: from simulated events, without training."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from atoll.sim.network import Between, Island, Network
from atoll.sim.run import Job, simulate
from atoll.sim.runner import Pace
from atoll.sync.rule import Strategy
from atoll.trees import Spec

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Utilisations that a bandwidth is looked for."""
ROUNDS, WARM = 16, 4
"""Simulated, and not counted at the start, while what is overlapped fills the link."""


@dataclass(frozen=True)
class Setting:
    """Islands that are alike but for the jitter of their steps, each with a link of its own.

    Args: specs: of the model's parameters. workers: islands. step_s: seconds of an inner step. bandwidth: bits per
    second of each island's link, in each direction; infinite if None. latency: seconds one way. jitter: standard
    deviation of a step's duration, as a part of it. seed: of the jitter.
    """

    specs: tuple[Spec, ...]
    workers: int
    step_s: float
    bandwidth: float = math.inf
    latency: float = 0.0
    jitter: float = 0.0
    seed: int = 0

    def network(self) -> Network:
        """Every island at a site of its own."""
        islands = tuple(
            Island(f"site {worker}", self.bandwidth, self.bandwidth, self.step_s, self.jitter)
            for worker in range(self.workers)
        )
        return Network(islands, elsewhere=Between(latency=self.latency))


@dataclass(frozen=True)
class Planned:
    """What a method costs in a setting.

    Args: utilisation: part of the time that islands train. step_s: mean seconds from one inner step to the next,
    waiting included. nbytes: that the busiest island sends in one inner step, on average. period: inner steps of a
    round. needed: bits per second that reach each of `TARGETS`, or None where none does.
    """

    method: str
    utilisation: float
    step_s: float
    nbytes: float
    period: int
    needed: Mapping[float, float | None]


def utilisation(strategy: Strategy, period: int, setting: Setting) -> tuple[float, float, float]:
    """Part of the time that islands train; seconds from step to step; bytes that the busiest island sends per step.

    Args: period: inner steps of a round, of which whole ones are simulated.
    """
    steps = period * ROUNDS
    trace = simulate(
        Job(strategy, setting.specs, steps, warm=period * WARM), setting.network(), pace=Pace(setting.seed)
    )
    used = trace.utilisation
    return used, setting.step_s / used, max(trace.sent) / steps


def needed(strategy: Strategy, period: int, setting: Setting, target: float) -> float | None:
    """The bandwidth in bits per second, to a percent, from which on a method reaches a utilisation; None if no link
    is fast enough."""

    def reaches(bandwidth: float) -> bool:
        return utilisation(strategy, period, replace(setting, bandwidth=bandwidth))[0] >= target

    if not reaches(math.inf):
        return None
    low, high = 1.0, 1e15
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def plan(method: str, strategy: Strategy, period: int, setting: Setting) -> Planned:
    """Utilisation, time and traffic of a method, and the bandwidth that it would need.

    Raises: CompositionError if strategy and model do not fit.

    Example:
        >>> from atoll.parts.outers import nesterov
        >>> from atoll.parts.schedules import every
        >>> from atoll.sim.run import spec
        >>> from atoll.sync.rule import Rule
        >>> diloco = Strategy((Rule(every(100), outer=nesterov(0.7, 0.9)),))
        >>> planned = plan("diloco", diloco, 100, Setting((spec(1e9),), workers=8, step_s=1.0, bandwidth=1e9))
        >>> round(planned.utilisation, 3), round(planned.needed[0.9] / 1e9, 1)
        (0.641, 5.1)
    """
    used, step_s, nbytes = utilisation(strategy, period, setting)
    return Planned(
        method, used, step_s, nbytes, period, {target: needed(strategy, period, setting, target) for target in TARGETS}
    )
