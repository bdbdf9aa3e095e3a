"""Islands that follow one calendar do what they would do each with a flow of its own, and so does a keeper without
numbers."""

from dataclasses import replace

import pytest

from atoll.parts.keepers import evenly, keeper
from atoll.parts.landings import OnArrival
from atoll.parts.mixers import Work
from atoll.parts.outers import nesterov
from atoll.parts.schedules import at, every, staggered
from atoll.recipes.methods import async_local_sgd, decoupled, diloco
from atoll.sim import run as sim
from atoll.sim.arrivals import foreseen
from atoll.sim.hollow import Hollow
from atoll.sim.network import Between, Island, Network
from atoll.sim.numerics import Shapes
from atoll.sim.pace import Pace
from atoll.sim.run import Job, simulate, spec
from atoll.sim.runner import NONE, Course
from atoll.sim.trace import Trace
from atoll.sim.trainee import Trainee
from atoll.sync.carry import Carry
from atoll.sync.keeping import Keeping
from atoll.sync.rule import Rule, Strategy
from atoll.sync.state import SyncState
from atoll.wire import Membership

SPECS = (spec(3e5, "embed.weight"), *(spec(2e5, f"layers.{block}.weight") for block in range(6)))
WORKERS = tuple(range(8))


def network(bits: float) -> Network:
    """Islands of unequal links and speeds at three sites."""
    islands = (Island(f"site {m % 3}", bits * (1 + m % 4), 1.5 * bits, 1 + 0.1 * m, jitter=0.05) for m in WORKERS)
    return Network(tuple(islands), elsewhere=Between(2.5 * bits, latency=0.05))


def one_by_one(job: Job, where: Network) -> Trace:
    """Each island with a flow and state of its own, and a keeper that steps anchors of no elements."""
    hollow = Hollow.of(job.strategy, job.specs)
    states = [SyncState(hollow.model(), hollow.strategy, Membership(WORKERS, me)) for me in WORKERS]
    course, keeping = Course(job.steps, job.warm, Pace(1)), Keeping(hollow.model(), hollow.strategy, len(WORKERS))
    trainees = [Trainee(state) for state in states]
    return sim.run(trainees, where, Shapes(hollow, NONE), course, keeping, keeps=True).trace


FAST, SLOW, SLOWER = network(1e9), network(2e7), network(8e6)
ALIKE = Network(tuple(Island("here", step_s=1.0) for _ in WORKERS))
"""Everything happens at one time."""


def picky(work: Work) -> float:
    """Who did not do exactly a period's steps does not count, so that a trace tells how many were done."""
    return float(work.steps == 5)


KEPT = keeper(3, 2, evenly(), nesterov(0.7, 0.9))
SEVERAL = Strategy(
    (
        Rule(every(7), carry=Carry.LIVE, mixer=KEPT, landing=OnArrival()),
        Rule(staggered(9, 1), carry=Carry.LIVE, mixer=replace(KEPT, quorum=8), landing=OnArrival()),
        Rule(at(1, 2, 30, 31, 90), mixer=replace(KEPT, quorum=1, grace=0)),
    )
)
"""Some landings are looked for, one is waited for, and all serve one fragment."""


@pytest.mark.parametrize("where", [FAST, SLOW, SLOWER, ALIKE], ids=["fast", "slow", "slower", "alike"])
@pytest.mark.parametrize(
    "strategy",
    [
        decoupled(period=10, fragments=3).strategy,
        decoupled(period=4, fragments=3, quorum=2, grace=0).strategy,
        decoupled(period=12, fragments=5, quorum=5, grace=3).strategy,
        decoupled(period=20, fragments=6, quorum=8, grace=0).strategy,
        Strategy((Rule(every(1), carry=Carry.LIVE, mixer=KEPT, landing=OnArrival()),)),
        Strategy((Rule(every(5), carry=Carry.LIVE, mixer=replace(KEPT, weigh=picky), landing=OnArrival()),)),
        async_local_sgd(period=10).strategy,
        SEVERAL,
    ],
    ids=["decoupled", "each-pair", "grace", "all", "every-step", "refusing", "async-local-sgd", "several-rules"],
)
def test_eight_islands_by_calendar_do_what_the_same_eight_do_one_by_one(strategy: Strategy, where: Network) -> None:
    job = Job(strategy, SPECS, steps=103, warm=21)
    assert foreseen(strategy, NONE)
    together, alone = simulate(job, where, pace=Pace(1), keeps=True), one_by_one(job, where)
    assert list(together.lines()) == list(alone.lines())
    assert together.as_json() == alone.as_json()
    assert sum(together.landed) > 0


def test_only_without_faults_and_with_a_keeper_there_is_a_calendar() -> None:
    assert foreseen(decoupled().strategy, NONE)
    assert not foreseen(decoupled().strategy, replace(NONE, loss=0.1))
    assert not foreseen(diloco().strategy, NONE)
