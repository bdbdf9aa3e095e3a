"""Islands that follow one script do what they would do each with a flow of its own."""

from dataclasses import replace

import pytest

from atoll.recipes.methods import METHODS
from atoll.sim import run as sim
from atoll.sim.hollow import Hollow
from atoll.sim.network import Between, Island, Network
from atoll.sim.numerics import Shapes
from atoll.sim.pace import BLOCK, Pace, Walk
from atoll.sim.run import Job, simulate, spec
from atoll.sim.runner import NONE, Course
from atoll.sim.script import alike
from atoll.sim.trace import Trace
from atoll.sim.trainee import Trainee
from atoll.sync.state import SyncState
from atoll.wire import Membership

SPECS = (spec(3e5, "embed.weight"), *(spec(2e5, f"layers.{block}.weight") for block in range(3)))
PORTS = tuple(Island(f"site {m % 3}", 2e7 * (1 + m % 4), 3e7, 1 + 0.1 * m, jitter=0.05) for m in range(8))
NETWORK = Network(PORTS, elsewhere=Between(5e7, latency=0.05))
SCRIPTED = [name for name in METHODS if name != "single" and alike(METHODS[name]().strategy, NONE)]


def one_by_one(job: Job, pace: Pace) -> Trace:
    """Each island with a flow and state of its own."""
    hollow = Hollow.of(job.strategy, job.specs)
    states = [SyncState(hollow.model(), hollow.strategy, Membership(tuple(range(8)), me)) for me in range(8)]
    course = Course(job.steps, job.warm, pace)
    return sim.run([Trainee(state) for state in states], NETWORK, Shapes(hollow, NONE), course, None, keeps=True).trace


@pytest.mark.parametrize("name", SCRIPTED)
def test_eight_islands_by_script_do_what_the_same_eight_do_one_by_one(name: str) -> None:
    job = Job(METHODS[name]().strategy, SPECS, steps=130, warm=50)
    scripted = simulate(job, NETWORK, pace=Pace(1), keeps=True)
    alone = one_by_one(job, Pace(1))
    assert list(scripted.lines()) == list(alone.lines())
    assert scripted.as_json() == alone.as_json()
    assert sum(scripted.landed) == sum(alone.landed) > 0


def test_only_where_answers_or_faults_decide_there_is_no_script() -> None:
    assert set(METHODS) - set(SCRIPTED) == {"single", "decoupled", "async-local-sgd", "data-parallel"}
    assert not alike(METHODS["diloco"]().strategy, replace(NONE, loss=0.1))


def test_durations_do_not_depend_on_where_a_stretch_of_steps_begins_or_on_what_was_asked_before() -> None:
    island = Island(step_s=2.0, jitter=0.1)
    ahead, back = Walk(3, island, 5), Walk(3, island, 5)
    steps = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]
    assert [ahead.until(step) for step in steps] == [back.until(step) for step in reversed(steps)][::-1]
    assert ahead.until(20_000) / 20_000 == pytest.approx(2.0, rel=4 * 0.1 / 20_000**0.5)
    each = [ahead.until(step + 1) - ahead.until(step) for step in range(20_000)]
    spread = (sum((second - 2.0) ** 2 for second in each) / len(each)) ** 0.5
    assert spread == pytest.approx(0.2, rel=0.03)
    assert Walk(4, island, 5).until(9) != ahead.until(9) != Walk(3, island, 6).until(9)
