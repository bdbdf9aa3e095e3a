"""How long does a plan for many islands take? One core, no arithmetic: the flows of every island on one virtual clock.

Islands stand at eight sites with links of 10 Gbit/s between them and 50 ms one way; each has a link of 100 Mbit/s to 1
Gbit/s of its own, and steps of 0.9 to 1.5 s with 5 % jitter. A round is 10 steps (a period; of 48 for 24 fragments).
The model has 1 M parameters in 30 blocks.
"""

import random
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.recipes.methods import METHODS
from atoll.sim.network import Between, Island, Network
from atoll.sim.pace import Pace
from atoll.sim.run import Job, simulate, spec
from bench.measure import Figure

ROUNDS = 100


@dataclass(frozen=True)
class Case:
    """Islands, a method with its period and other arguments, and seconds that it may take."""

    islands: int
    name: str
    period: int
    goal: float
    arguments: Mapping[str, int] = field(default_factory=dict[str, int])


CASES = (
    Case(1000, "diloco", 10, 20.0),
    Case(1000, "factored-gossip", 10, 20.0),
    Case(1000, "noloco", 10, 20.0),
    Case(1000, "streaming", 10, 120.0, {"fragments": 8, "delay": 1}),
    Case(1000, "decoupled", 48, 120.0, {"fragments": 24}),
    Case(10_000, "noloco", 10, 120.0),
)


def figures(share: float = 1.0, rounds: int = ROUNDS, cases: Sequence[Case] = CASES) -> Iterator[Figure]:
    """Seconds of one core for each case, and the most memory until then.

    Args: share: of the islands.
    """
    specs = (spec(4e4, "embed.weight"), *(spec(3.2e4, f"layers.{block}.weight") for block in range(30)))
    for case in cases:
        count = round(case.islands * share)
        strategy = METHODS[case.name](period=case.period, **case.arguments).strategy
        job = Job(strategy, specs, steps=rounds * case.period)
        began = time.process_time()
        simulate(job, network(count), pace=Pace(1))
        seconds = time.process_time() - began
        what = f"{case.name}, {count} islands, {rounds} rounds"
        yield Figure(what, [seconds], "s of one core", most=case.goal)
        # ru_maxrss is in KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
        yield Figure(what, [peak], "GiB, the most so far", most=2.0)


def network(count: int, seed: int = 0) -> Network:
    """Islands of unequal links and speeds at eight sites."""
    draw = random.Random(seed)
    islands: list[Island] = []
    for number in range(count):
        bits = draw.choice((1e8, 2e8, 5e8, 1e9))
        islands.append(Island(f"site {number % 8}", bits, bits, draw.uniform(0.9, 1.5), jitter=0.05))
    return Network(tuple(islands), elsewhere=Between(10e9, latency=0.05))
