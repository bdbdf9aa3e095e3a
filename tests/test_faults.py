"""A schedule of faults: what it says at a time, what it refuses, and that a file gives it back."""

import math
import re
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.faults import Cut, Death, Fault, Faults, Freeze, Partition, Rejoin, Slowness
from atoll.peers.faults import Dropping
from atoll.wire import Key

# When training is done


@pytest.mark.parametrize(
    ("events", "start", "work", "done"),
    [
        ((), 3.0, 0.1, 3.0 + 0.1),
        # 2 s before the freeze of 5 s, 8 s after it
        ((Freeze(0, 10.0, 5.0),), 8.0, 10.0, 23.0),
        # begins in the middle of a freeze
        ((Freeze(0, 10.0, 5.0),), 12.0, 1.0, 16.0),
        # is done when the freeze begins, and not a moment later
        ((Freeze(0, 10.0, 5.0),), 8.0, 2.0, 10.0),
        # begins when it ends
        ((Freeze(0, 10.0, 5.0),), 15.0, 2.0, 17.0),
        # 2 s at full speed, 10 s for 2.5 s of work, 5.5 s at full speed
        ((Slowness(0, 10.0, 10.0, 4.0),), 8.0, 10.0, 25.5),
        # all of it while slow
        ((Slowness(0, 10.0, 10.0, 4.0),), 12.0, 2.0, 20.0),
        # 4 s at 1/2, 2 s of standing still, 4 s at 1/2, 1 s at full speed
        ((Slowness(0, 0.0, 10.0, 2.0), Freeze(0, 4.0, 2.0)), 0.0, 5.0, 11.0),
        # two at once: 1/6 from 2 to 8
        ((Slowness(0, 0.0, 8.0, 2.0), Slowness(0, 2.0, 8.0, 3.0)), 2.0, 1.0, 8.0),
        # dies before, then, after, while dead, and after it is back
        ((Death(0, 10.0), Rejoin(0, 20.0)), 5.0, 6.0, math.inf),
        ((Death(0, 10.0), Rejoin(0, 20.0)), 5.0, 5.0, 10.0),
        ((Death(0, 10.0), Rejoin(0, 20.0)), 10.0, 1.0, math.inf),
        ((Death(0, 10.0), Rejoin(0, 20.0)), 19.0, 0.5, math.inf),
        ((Death(0, 10.0), Rejoin(0, 20.0)), 20.0, 7.0, 27.0),
        # what another island suffers
        ((Death(1, 1.0), Freeze(1, 0.0, 9.0), Slowness(1, 0.0, 9.0, 2.0)), 0.0, 4.0, 4.0),
        # nothing to do: at once, when it thaws, never
        ((Freeze(0, 10.0, 5.0),), 9.0, 0.0, 9.0),
        ((Freeze(0, 10.0, 5.0), Freeze(0, 15.0, 1.0)), 10.0, 0.0, 16.0),
        ((Freeze(0, 10.0, 5.0), Death(0, 12.0)), 11.0, 0.0, math.inf),
    ],
)
def test_work_is_done_when_the_hand_computed_time_has_come(
    events: tuple[Fault, ...], start: float, work: float, done: float
) -> None:
    assert Faults(events).worked(0, start, work) == done


TICK = 1 / 64
TIMES = st.integers(0, 80).map(lambda number: number / 4)
LENGTHS = st.integers(1, 40).map(lambda number: number / 4)
WINDOWS = st.one_of(
    st.builds(Freeze, st.just(0), TIMES, LENGTHS),
    st.builds(Slowness, st.just(0), TIMES, LENGTHS, st.sampled_from([1.25, 2.0, 3.0, 10.0])),
)


@given(st.lists(WINDOWS, max_size=5), st.none() | TIMES, TIMES, LENGTHS)
def test_work_is_done_when_a_fine_integration_says(
    windows: list[Freeze | Slowness], death: float | None, start: float, work: float
) -> None:
    dies = math.inf if death is None else death
    faults = Faults((*windows, *([] if death is None else [Death(0, death)])))
    now, done = start, 0.0
    while done < work - 1e-9 and now < dies:
        rate = 1.0
        for window in windows:
            if window.at <= now < window.at + window.seconds:
                rate *= 0 if isinstance(window, Freeze) else 1 / window.factor
        now += TICK
        done += TICK * rate
    got = faults.worked(0, start, work)
    if done < work - 1e-9 or start >= dies:
        assert got == math.inf
    else:
        assert now - TICK - 1e-6 <= got <= now + 1e-6


# What holds at a time


def test_a_change_holds_from_its_time_on_and_ends_before_its_end() -> None:
    faults = Faults((Death(0, 1.0), Rejoin(0, 2.0), Freeze(1, 3.0, 1.0), Cut(("a", "b"), 5.0, 1.0, 0.25)))
    assert [faults.dead(0, now) for now in (0.0, 0.99, 1.0, 1.99, 2.0, 9.0)] == [False, False, True, True, False, False]
    assert [faults.frozen(1, now) for now in (2.99, 3.0, 3.99, 4.0)] == [False, True, True, False]
    assert [faults.left("a", "b", now) for now in (4.99, 5.0, 5.99, 6.0)] == [1.0, 0.25, 0.25, 1.0]
    assert not faults.dead(1, 1.0)
    assert not faults.frozen(0, 3.0)
    assert faults.changes() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_time_at_which_several_things_happen_is_one_change() -> None:
    assert Faults((Freeze(0, 1.0, 2.0), Death(1, 3.0), Slowness(0, 3.0, 1.0, 2.0))).changes() == [1.0, 3.0, 4.0]
    assert Faults().changes() == []


def test_cuts_and_partitions_leave_the_product_of_what_each_leaves() -> None:
    faults = Faults(
        (
            Cut(("a", "b"), 0.0, 10.0, 0.5),
            Cut(("b", "a"), 5.0, 10.0, 0.5),
            Cut(("c", "c"), 0.0, 10.0, 0.1),
            Partition(("c", "d"), 2.0, 2.0),
        )
    )
    assert [faults.left("b", "a", now) for now in (0.0, 5.0, 10.0, 15.0)] == [0.5, 0.25, 0.5, 1.0]
    assert [faults.left(a, b, 3.0) for a, b in ("ac", "ca", "db", "cd", "ab", "aa")] == [0.0, 0.0, 0.0, 1.0, 0.5, 1.0]
    assert faults.left("c", "c", 3.0) == 0.1


# Messages that get lost


@pytest.mark.parametrize(
    ("key", "lost"),
    [
        (Key(0, 0, 0), {0, 4, 6}),
        (Key(0, 1, 7), {4, 6, 8, 9}),
        (Key(2, 0, 5, 1), {5, 8, 11}),
        (Key(-1, 0, 0), set[int]()),
    ],
)
def test_a_seed_loses_the_messages_that_it_has_always_lost(key: Key, lost: set[int]) -> None:
    assert Faults(loss=0.3, seed=3).lost(key, range(12)) == lost


@given(st.floats(0, 0.99), st.integers(0, 99), st.builds(Key, *[st.integers(0, 50)] * 4))
def test_a_message_is_lost_where_its_digest_is_below_the_probability(loss: float, seed: int, key: Key) -> None:
    want: set[int] = set()
    for worker in range(9):
        word = f"{seed}:{key.rule}.{key.fragment}.{key.round}.{key.lane}:{worker}"
        if int(sha256(word.encode()).hexdigest()[:16], 16) < loss * 2**64:
            want.add(worker)
    assert Faults(loss=loss, seed=seed).lost(key, range(9)) == want == Dropping(loss, seed)(key, range(9))


# Files

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
AT = st.floats(0, 1e300)
FOR = st.floats(0, 1e300, exclude_min=True)
ISLANDS = st.integers(0, 10**6)
ANY: st.SearchStrategy[Fault] = st.one_of(
    st.builds(Death, ISLANDS, AT),
    st.builds(Rejoin, ISLANDS, AT),
    st.builds(Freeze, ISLANDS, AT, FOR),
    st.builds(Slowness, ISLANDS, AT, FOR, st.floats(1, allow_infinity=False)),
    st.builds(Cut, st.tuples(NAMES, NAMES), AT, FOR, st.floats(0, 1)),
    st.builds(Partition, st.lists(NAMES, max_size=3).map(tuple), AT, FOR),
)
SCHEDULES = st.builds(
    Faults,
    st.lists(ANY, max_size=8).map(tuple),
    st.floats(0, 1, exclude_max=True),
    st.integers(),
    st.floats(0, 1e300, exclude_min=True),
)


@given(SCHEDULES)
def test_a_file_gives_the_schedule_back(tmp_path_factory: pytest.TempPathFactory, faults: Faults) -> None:
    path = tmp_path_factory.getbasetemp() / "faults.toml"
    path.write_text(faults.text(), encoding="utf-8")
    assert Faults.read(path) == faults


BY_HAND = """
lease = "1.5min"

[[partition]]
sites = ["a", "c"]
at = "3h"
for = "500ms"

[[death]]
island = 2
at = "2min"

[[cut]]
sites = ["a", "b"]
at = "0s"
for = "2days"

[[rejoin]]
island = 2
at = "180s"

[[slowness]]
island = 0
at = "10s"
for = "1min"
factor = 3
"""


def test_a_file_by_hand_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(BY_HAND)
    assert Faults.read(path).events == (
        Cut(("a", "b"), 0.0, 172800.0),
        Slowness(0, 10.0, 60.0, 3.0),
        Death(2, 120.0),
        Rejoin(2, 180.0),
        Partition(("a", "c"), 10800.0, 0.5),
    )
    assert Faults.read(path) == Faults(Faults.read(path).events[::-1], lease=90.0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[death]]\nisland = 2\nat = 120", ", [[death]] 1: at was 120, which has no unit; write 120s"),
        (
            '[[death]]\nisland = 1\nat = "1s"\n[[death]]\nisland = 2\nat = "soon"',
            ", [[death]] 2: at was 'soon', but it takes a number with a unit; give one, such as 30s",
        ),
        ('[[death]]\nat = "1s"', ", [[death]] 1: island is missing; write island = 2"),
        ("[[freeze]]\nisland = 2\nat = '1s'", ', [[freeze]] 1: for is missing; write for = "30s"'),
        (
            "[[death]]\nisland = '2'\nat = '1s'",
            ", [[death]] 1: island was '2', but it takes a whole number; give one, such as 2",
        ),
        (
            "[[death]]\nisland = true\nat = '1s'",
            ", [[death]] 1: island was true, but it takes a whole number; give one, such as 2",
        ),
        (
            "[[slowness]]\nisland = 1\nat = '1s'\nfor = '1s'\nfactor = '2'",
            ", [[slowness]] 1: factor was '2', but it takes a number; give one, such as 0.5",
        ),
        (
            "[[cut]]\nsites = 'a'\nat = '1s'\nfor = '1s'",
            """, [[cut]] 1: sites was 'a', but it takes a list of words; give one, such as ["a", "b"]""",
        ),
        (
            "[[cut]]\nsites = [1, 2]\nat = '1s'\nfor = '1s'",
            """, [[cut]] 1: sites was [1, 2], but it takes a list of words; give one, such as ["a", "b"]""",
        ),
        (
            "[[cut]]\nsites = ['a']\nat = '1s'\nfor = '1s'",
            ", [[cut]] 1: sites was ['a'], but a cut is between two; give two, or write [[partition]] for sites that "
            "are cut off from all others",
        ),
        ("[[death]]\nisland = 2\nwhen = '1s'", ", [[death]] 1: when is not known here; give one of island, at"),
        ("[[deaths]]\nisland = 2\nat = '1s'", ": deaths is not known here; did you mean death?"),
        (
            "[death]\nisland = 2\nat = '1s'",
            ": death was {'island': 2, 'at': '1s'}, but there may be several; write [[death]] above the fields of each",
        ),
        (
            "loss = 1.5",
            ": loss was 1.5, but some messages must arrive; give a probability from 0 up to, but not including, 1",
        ),
        ("lease = 10", ": lease was 10, which has no unit; write 10s"),
        ("seed = 1.5", ": seed was 1.5, but it takes a whole number; give one, such as 2"),
    ],
)
def test_a_file_that_is_not_right_is_refused_with_path_field_value_and_what_to_write(
    tmp_path: Path, text: str, sentence: str
) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        Faults.read(path)
    assert str(refused.value) == f"{path}{sentence}"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none.toml cannot be read \(No such file or directory\); give a TOML file"):
        Faults.read(tmp_path / "none.toml")
    with pytest.raises(UsageError, match=r"cannot be read \(Is a directory\); give a TOML file"):
        Faults.read(tmp_path)
    for content in (b"\xff\xfe", b"seed = ", b"[[death]\n"):
        (tmp_path / "no.toml").write_bytes(content)
        with pytest.raises(UsageError, match=r"no.toml is not TOML \(.+\); mend it there"):
            Faults.read(tmp_path / "no.toml")


# What a run cannot have


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"loss": 1.0}, "loss was 1.0, but some messages must arrive; give a probability from 0 up to, but not"),
        ({"loss": -0.1}, "loss was -0.1, but some messages must arrive"),
        ({"loss": math.nan}, "loss was nan, but some messages must arrive"),
        ({"lease": 0.0}, "lease was 0.0, but after it whoever is not heard counts as gone; give a finite number of"),
        ({"lease": math.inf}, "lease was inf, but after it whoever is not heard counts as gone"),
    ],
)
def test_a_loss_that_loses_all_and_a_lease_that_never_ends_are_refused(
    settings: dict[str, float], sentence: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence)):
        Faults(**settings)


@pytest.mark.parametrize(
    ("faults", "sentence"),
    [
        (Faults((Death(4, 1.0),)), "the death of island 4 at 1s: island was 4, but the run has 4, numbered 0 to 3; "
            "give one of these"),
        (Faults((Freeze(-1, 1.0, 1.0),)), "the freeze of island -1 at 1s: island was -1, but the run has 4, numbered "
            "0 to 3; give one of these"),
        (Faults((Cut(("a", "d"), 1.0, 1.0),)), "the cut between a and d at 1s: sites has 'd', where no island stands; "
            "the sites are a, b, c"),
        (Faults((Partition(("d",), 1.0, 1.0),)), "the partition of d at 1s: sites has 'd', where no island stands; "
            "the sites are a, b, c"),
        (Faults((Partition(("b", "a", "c"), 1.0, 1.0),)), "the partition of b, a, c at 1s: sites was ('b', 'a', 'c'), "
            "which cuts nobody off; give some of a, b, c, but not all"),
        (Faults((Partition((), 1.0, 1.0),)), "the partition of  at 1s: sites was (), which cuts nobody off; give some "
            "of a, b, c, but not all"),
        (Faults((Death(1, -1.0),)), "Death(island=1, at=-1.0): at was -1.0, but a run begins at 0; give seconds from "
            "then on"),
        (Faults((Death(1, math.inf),)), "Death(island=1, at=inf): at was inf, but a run begins at 0; give seconds "
            "from then on"),
        (Faults((Freeze(1, 2.0, 0.0),)), "the freeze of island 1 at 2s: seconds (`for` in a file) was 0.0, so it would "
            "never be; give a number above 0"),
        (Faults((Freeze(1, 2.0, math.inf),)), "the freeze of island 1 at 2s: seconds (`for` in a file) was inf, which "
            "cuts a worker off for ever; give a finite number after which it ends, or write a Death"),
        (Faults((Slowness(1, 2.0, math.inf, 2.0),)), "the slowness of island 1 at 2s: seconds (`for` in a file) was "
            "inf, which slows a worker down for ever; give a finite number after which it ends, or write a Death"),
        (Faults((Slowness(1, 2.0, 1.0, 1.0),)), "the slowness of island 1 at 2s: factor was 1.0, but steps take that "
            "many times as long; give a number above 1, or write a Freeze for an island that stands still"),
        (Faults((Cut(("a", "b"), 2.0, 1.0, 1.0),)), "the cut between a and b at 2s: left was 1.0, but it is the part "
            "of the capacity that is left; give a number from 0 up to, but not including, 1"),
        (Faults((Rejoin(1, 2.0),)), "the rejoin of island 1 at 2s: island was 1, which is not dead then; give a Death "
            "before, or take it out"),
        (Faults((Death(1, 2.0), Death(1, 3.0), Rejoin(1, 4.0))), "the death of island 1 at 3s: island was 1, which is "
            "dead since 2s; give a Rejoin between, or take one of the two out"),
        (Faults((Death(1, 2.0), Rejoin(1, 2.0))), "island 1 dies and rejoins at the same time: at was 2s for both; "
            "give one of them a later one"),
        (Faults(tuple(Death(island, 1.0 + island) for island in range(4))), "at 4s island 3 dies, and nobody is left "
            "of 4; let another rejoin before, or take a Death out"),
        (Faults((Freeze(1, 2.0, 3.0), Freeze(1, 4.0, 1.0))), "the freeze of island 1 at 4s: at was 4s, but the freeze "
            "of island 1 at 2s lasts until 5s; let one end before the other begins, or make them one"),
        (Faults((Cut(("a", "b"), 2.0, 3.0), Cut(("b", "a"), 4.0, 1.0, 0.5))), "the cut between b and a at 4s: at was "
            "4s, but the cut between a and b at 2s lasts until 5s; let one end before the other begins, or make them "
            "one"),
        (Faults((Partition(("a", "b"), 2.0, 3.0), Partition(("b",), 4.0, 1.0))), "the partition of b at 4s: at was 4s, "
            "but the partition of a, b at 2s lasts until 5s; let one end before the other begins, or make them one"),
    ],
)  # fmt: skip
def test_what_a_run_cannot_have_is_refused_with_field_value_and_what_to_write(faults: Faults, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        faults.check(4, ["b", "a", "c", "a"])
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    "events",
    [
        (),
        # the last but one dies as another comes back
        (Death(0, 1.0), Death(1, 2.0), Death(2, 3.0), Rejoin(1, 4.0), Death(3, 4.0)),
        (Death(0, 0.0), Rejoin(0, 1.0), Death(0, 2.0)),
        # one ends where the next begins; of another kind, or elsewhere, both may hold
        (Freeze(0, 1.0, 1.0), Freeze(0, 2.0, 1.0), Freeze(1, 1.5, 1.0), Slowness(0, 1.0, 2.0, 1.5)),
        (
            Cut(("a", "b"), 1.0, 9.0),
            Cut(("a", "c"), 2.0, 1.0),
            Partition(("a",), 1.0, 9.0),
            Partition(("b",), 2.0, 1.0),
        ),
    ],
)
def test_what_a_run_can_have_is_let_be(events: tuple[Fault, ...]) -> None:
    Faults(events, loss=0.5).check(4, ["a", "b", "c"])


# A value


def test_schedules_of_the_same_events_are_equal_in_whatever_order_and_their_repr_rebuilds_them() -> None:
    events = (Rejoin(1, 3.0), Cut(("a", "b"), 1.0, 1.0), Death(1, 2.0), Freeze(0, 2.0, 1.0), Death(0, 9.0))
    faults = Faults(events, 0.1, 3, 20.0)
    assert faults == Faults(events[::-1], 0.1, 3, 20.0)
    faults.left("a", "b", 1.0)
    assert eval(repr(faults)) == faults
    assert hash(replace(faults)) == hash(faults)
    assert [each.name for each in fields(Faults)] == ["events", "loss", "seed", "lease"]
