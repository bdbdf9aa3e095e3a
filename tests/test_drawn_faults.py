"""Faults that are drawn from a seed: their law, and that a run can have them."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.faults import Death, Faults, Rejoin


@given(st.integers(1, 6), st.sampled_from([2.0, 30.0, 1e4]), st.sampled_from([1.0, 50.0]), st.integers(0, 99))
def test_a_drawn_schedule_is_one_that_a_run_can_have(islands: int, every: float, away: float, seed: int) -> None:
    faults = Faults.drawn(islands, 300.0, every=every, away=away, seed=seed)
    faults.check(islands, ["a"])
    for now in faults.changes():
        assert sum(faults.dead(island, now) for island in range(islands)) < islands
    deaths = [event for event in faults.events if isinstance(event, Death)]
    assert all(death.at < 300 for death in deaths)
    assert len(faults.events) == 2 * len(deaths)
    assert faults == Faults.drawn(islands, 300.0, every=every, away=away, seed=seed)


def test_deaths_are_a_poisson_process_and_absences_exponential() -> None:
    """40 islands that are rarely away: the means and spreads of an exponential, within four standard errors."""
    faults = Faults.drawn(40, 1e5, every=1000.0, away=100.0, seed=1)
    there: list[float] = []
    gone: list[float] = []
    for island in range(40):
        mine = [event.at for event in faults.events if isinstance(event, Death | Rejoin) and event.island == island]
        back = [0.0, *mine[1::2]]
        there += [dies - since for since, dies in zip(back, mine[::2], strict=False)]
        gone += [rejoins - dies for dies, rejoins in zip(mine[::2], mine[1::2], strict=True)]
    for found, mean in ((there, 1000.0), (gone, 100.0)):
        assert len(found) > 3000
        error = mean / math.sqrt(len(found))
        assert abs(statistics.mean(found) - mean) < 4 * error
        # the variance of the estimated spread of an exponential is twice that of its mean
        assert abs(statistics.stdev(found) - mean) < 4 * math.sqrt(2) * error


def test_another_seed_draws_another_schedule_and_another_island_none() -> None:
    one, other = (Faults.drawn(4, 1e3, every=100.0, away=1e-3, seed=seed) for seed in (1, 2))
    assert one.events != other.events
    more = Faults.drawn(5, 1e3, every=100.0, away=1e-3, seed=1)
    assert one.events == tuple(event for event in more.events if isinstance(event, Death | Rejoin) and event.island < 4)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"islands": 0}, "faults were to be drawn with islands 0; give a finite number above 0"),
        ({"seconds": -1.0}, "faults were to be drawn with seconds -1.0; give a finite number above 0"),
        ({"every": 0.0}, "faults were to be drawn with every 0.0; give a finite number above 0"),
        ({"away": math.inf}, "faults were to be drawn with away inf; give a finite number above 0"),
    ],
)
def test_numbers_that_nothing_can_be_drawn_from_are_refused(change: dict[str, Any], sentence: str) -> None:
    draw: Callable[..., Faults] = Faults.drawn
    with pytest.raises(UsageError) as refused:
        draw(**{"islands": 2, "seconds": 9.0, "every": 1.0, "away": 1.0, "seed": 0, **change})
    assert str(refused.value) == sentence
