"""How long does a plan for many islands take? One core, no arithmetic: the flows of every island on one virtual clock.

Islands stand at eight sites with links of 10 Gbit/s between them and 50 ms one way; each has a link of 100 Mbit/s to 1
Gbit/s of its own, and steps of 0.9 to 1.5 s with 5 % jitter. A round is 10 steps (a period; of 48 for 24 fragments).
The model has 1 M parameters in 30 blocks.
"""

import random
import resource
import time
from collections.abc import Iterator, Mapping

from atoll.recipes.methods import METHODS
from atoll.sim.network import Between, Island, Network
from atoll.sim.pace import Pace
from atoll.sim.run import Job, simulate, spec
from bench.measure import Figure

ROUNDS = 100
GOALS: Mapping[str, tuple[int, int, Mapping[str, int], float]] = {
    "diloco": (1000, 10, {}, 20.0),
    "factored-gossip": (1000, 10, {}, 20.0),
    "noloco": (1000, 10, {}, 20.0),
    "streaming": (1000, 10, {"fragments": 8, "delay": 1}, 120.0),
    "decoupled": (1000, 48, {"fragments": 24}, 120.0),
    "noloco": (10_000, 10, {}, 120.0),
}
"""By method: islands, period, other arguments, and seconds that it may take."""


def figures(share: float = 1.0, rounds: int = ROUNDS, names: tuple[str, ...] = tuple(GOALS)) -> Iterator[Figure]:
    """Seconds of one core for each method, and the most memory until then.

    Args: share: of the islands.
    """
    specs = (spec(4e4, "embed.weight"), *(spec(3.2e4, f"layers.{block}.weight") for block in range(30)))
    for name in names:
        islands, period, arguments, goal = GOALS[name]
        count = round(islands * share)
        strategy = METHODS[name](period=period, **arguments).strategy
        job = Job(strategy, specs, steps=rounds * period)
        began = time.process_time()
        simulate(job, network(count), pace=Pace(1))
        seconds = time.process_time() - began
        what = f"{name}, {count} islands, {rounds} rounds"
        yield Figure(what, [seconds], "s of one core", most=goal)
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
