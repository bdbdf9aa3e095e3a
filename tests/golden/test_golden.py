"""Did a refactor change anything? What each method is, and when its exchanges leave and land, against text on record.

After a change on purpose: python -c "from tests.golden.test_golden import record; record()" in the repository's root.
"""

from pathlib import Path

import pytest

from atoll.parts.fragments import by_name
from atoll.recipes.methods import METHODS
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


RECORDS = {"methods.txt": methods, "trace.txt": trace}


def record() -> None:
    """Write the records anew."""
    for name, text in RECORDS.items():
        (HERE / name).write_text(text())


@pytest.mark.parametrize("name", RECORDS)
def test_what_is_on_record_still_holds(name: str) -> None:
    assert RECORDS[name]() == (HERE / name).read_text()
