"""Did a refactor change anything? What each method is, and when its exchanges leave and land, against text on record.

After a change on purpose: python -c "from tests.golden.test_golden import record; record()" in the repository's root.
"""

from pathlib import Path

import pytest

from atoll.faults import Death, Faults, Rejoin
from atoll.parts.fragments import by_name
from atoll.recipes.methods import METHODS
from atoll.sim.network import Between, Island, Network
from atoll.sim.run import Job, simulate, spec
from atoll.sync.rule import Strategy
from atoll.testing import toys
from atoll.testing.turns import run_turns
from atoll.wire import Landed, Launched

HERE = Path(__file__).parent
BY_LAYER = by_name("first.*", "[ml]*", "head.*")


def methods() -> str:
    """The full composition of every method with its defaults."""
    return "".join(f"{name}\n    {make()!r}\n" for name, make in METHODS.items())


def trace() -> str:
    """Worker 0's events in 25 steps of streaming, period 6 and delay 2, on a toy of three fragments in fp64."""
    rules = METHODS["streaming"](period=6, fragments=2, delay=2).strategy.rules
    _, boundaries = run_turns(toys.Mlp(), Strategy(rules, BY_LAYER), workers=3, steps=25)
    lines: list[str] = []
    step = 0
    for events in boundaries:
        for event in events:
            key = f"rule {event.key.rule} fragment {event.key.fragment} round {event.key.round}"
            match event:
                case Launched():
                    step = event.step
                    lines.append(f"step {step:2} launched {key}")
                case Landed():
                    lines.append(f"        landed   {key} age {event.age} peers {event.peers} sent {event.sent}")
                case _:
                    lines.append(f"        lost     {key}")
    return "\n".join(lines) + "\n"


def simulated() -> str:
    """Three islands of unequal links and speeds on virtual time; one dies in the second round and comes back."""
    ports = (Island("a", 4e6, 4e6, 1.0), Island("b", 8e6, 8e6, 1.1), Island("b", 8e6, 8e6, 1.2))
    network = Network(ports, elsewhere=Between(latency=0.05))
    job = Job(METHODS["factored-gossip"](period=5).strategy, (spec(2e5),), steps=30)
    faults = Faults((Death(2, 8.0), Rejoin(2, 13.0)), lease=2.0)
    found = simulate(job, network, faults=faults, keeps=True)
    return "\n".join([*found.lines(), *found.totals()]) + "\n"


RECORDS = {"methods.txt": methods, "trace.txt": trace, "simulated.txt": simulated}


def record() -> None:
    """Write the records anew."""
    for name, text in RECORDS.items():
        (HERE / name).write_text(text())


@pytest.mark.parametrize("name", RECORDS)
def test_what_is_on_record_still_holds(name: str) -> None:
    assert RECORDS[name]() == (HERE / name).read_text()
