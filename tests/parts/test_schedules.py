"""Schedules against what they say in arithmetic, step by step."""

from collections.abc import Callable

import pytest

from atoll.errors import CompositionError
from atoll.parts.landings import After
from atoll.parts.schedules import NEVER, Schedule, at, every, staggered

# schedule, fragments to look at, and whether a round of fragment p closes at step t (written from the definition)
CASES: list[tuple[Schedule, int, Callable[[int, int], bool]]] = [
    (every(1), 2, lambda t, p: True),
    (every(7), 3, lambda t, p: t % 7 == 0),
    (staggered(10, 1), 1, lambda t, p: t % 10 == 0),
    (staggered(10, 3), 3, lambda t, p: t >= 10 + (0, 3, 6)[p] and (t - (0, 3, 6)[p]) % 10 == 0),
    (staggered(5, 5), 5, lambda t, p: t >= 5 + p and (t - p) % 5 == 0),
    (at(3, 4, 17), 2, lambda t, p: t in (3, 4, 17)),
]


@pytest.mark.parametrize(("schedule", "fragments", "due"), CASES, ids=[repr(case[0]) for case in CASES])
def test_the_next_step_is_the_first_that_is_due(
    schedule: Schedule, fragments: int, due: Callable[[int, int], bool]
) -> None:
    for fragment in range(fragments):
        for step in range(60):
            want = next((t for t in range(step + 1, 100) if due(t, fragment)), NEVER)
            assert schedule.next(step, fragment, {}) == want
            assert schedule.next(step, fragment, {"speed": 1.5}) == want, "these schedules read no signals"


@pytest.mark.parametrize("schedule", [case[0] for case in CASES], ids=repr)
def test_the_repr_of_a_schedule_rebuilds_it(schedule: Schedule) -> None:
    assert eval(repr(schedule), {"every": every, "staggered": staggered, "at": at}) == schedule


@pytest.mark.parametrize(("period", "fragments"), [(10, 3), (100, 7), (6, 6), (500, 4)])
def test_staggered_fragments_close_one_at_a_time_and_each_once_a_period(period: int, fragments: int) -> None:
    schedule = staggered(period, fragments)
    closed = [(schedule.next(t - 1, p, {}), p) for t in range(2 * period, 3 * period) for p in range(fragments)]
    steps = sorted({(t, p) for t, p in closed if 2 * period <= t < 3 * period})
    assert [p for _, p in sorted(steps, key=lambda each: each[1])] == list(range(fragments))
    assert len({t for t, _ in steps}) == fragments


def test_no_fragment_is_sent_before_a_whole_period_of_inner_steps() -> None:
    assert [staggered(10, 3).next(0, fragment, {}) for fragment in range(3)] == [10, 13, 16]


@pytest.mark.parametrize(
    "make",
    [
        lambda: every(0),
        lambda: staggered(0, 1),
        lambda: staggered(10, 0),
        lambda: staggered(3, 4),
        lambda: at(0, 5),
        lambda: at(5, 3),
        lambda: at(3, 3),
        lambda: After(0),
    ],
)
def test_a_schedule_or_landing_that_cannot_work_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(CompositionError):
        make()
