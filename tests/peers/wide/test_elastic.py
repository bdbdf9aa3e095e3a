"""Islands that come and go: bits as in one process without faults, and what becomes of rounds with them."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.parts.codecs import float4
from atoll.parts.fragments import by_name
from atoll.parts.landings import After
from atoll.parts.merges import blend
from atoll.parts.mixers import Work, all_mean, by_tokens, weighted
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every, staggered
from atoll.peers.wide.server import Server
from atoll.recipes.compressed import sparseloco
from atoll.recipes.diloco import eager_diloco
from atoll.recipes.gossip import factored_gossip, local_m1_m2, noloco
from atoll.sync.elastic import State, enter, offer
from atoll.sync.rule import Rule, Strategy
from atoll.sync.state import SyncState
from atoll.testing.islands import Loopback, Sea, serve
from atoll.testing.toys import Mlp
from atoll.testing.turns import run_turns
from atoll.wire import Keep, Landed, Launched, Lost, Membership
from tests.peers.wide.crew import Sailor

DILOCO = Strategy((Rule(every(5), outer=nesterov(0.7, 0.9)),))
STREAMING = Strategy(
    (Rule(staggered(6, 2), sgd(0.8), codec=float4(), mixer=all_mean(Keep()), landing=After(2), merge=blend(0.5)),),
    by_name("first*", "*"),
)


@contextmanager
def coast(folder: Path, islands: int, *, lease: float = 10.0) -> Generator[tuple[Sea, Server, list[str]]]:
    sea, said = Sea(), list[str]()
    server = serve(sea, folder, islands, said.append, lease=lease)
    try:
        yield sea, server, said
    finally:
        server.close()


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)


@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize(
    "strategy",
    [
        DILOCO,
        STREAMING,
        eager_diloco(5).strategy,
        factored_gossip(5).strategy,
        local_m1_m2(5).strategy,
        noloco(5).strategy,
        sparseloco(5).strategy,
    ],
    ids=["diloco", "streaming", "eager", "factored-gossip", "local-m1-m2", "noloco", "sparseloco"],
)
def test_without_faults_bits_are_those_of_one_process(strategy: Strategy, workers: int, tmp_path: Path) -> None:
    syncs, _ = run_turns(Mlp(), strategy, workers=workers, steps=20)
    with coast(tmp_path, workers) as (sea, _, _):
        crew = [Sailor(sea, worker, Mlp(), strategy, 20) for worker in range(workers)]
        for sailor in crew:
            sailor.join()
    for sailor, sync in zip(crew, syncs, strict=True):
        assert sailor.sync
        assert sailor.sync.state.digest() == sync.state.digest()


def test_a_death_costs_no_round_and_all_who_are_left_hold_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = set[tuple[int, int]]()
    monkeypatch.setattr(Loopback, "drop", lambda port, to: dropped.add((port.me, to)))
    with coast(tmp_path, 4) as (sea, _, said):
        paces = [lambda step: 0.002, lambda step: 0.002, lambda step: 0.05, lambda step: 0.002]
        crew = [Sailor(sea, worker, Mlp(), DILOCO, 60, pace) for worker, pace in enumerate(paces)]
        until(lambda: len(crew[0].log) > 6)
        time.sleep(0.05)  # the others wait for it in an exchange
        crew[2].kill()
        for sailor in crew:
            sailor.join()
    left = [crew[0], crew[1], crew[3]]
    for sailor in left:
        assert [event for _, event in sailor.log if isinstance(event, Lost)] == []
        assert sum(isinstance(event, Landed) for _, event in sailor.log) == 12
    assert len({sailor.digests[60] for sailor in left}) == 1
    assert any("worker 2 is gone" in line for line in said)
    assert dropped == {(0, 2), (1, 2), (3, 2)}, "what still waits for the dead one takes the others' share of a link"


def test_an_island_that_comes_later_holds_the_same_from_its_first_boundary_on(tmp_path: Path) -> None:
    with coast(tmp_path, 2) as (sea, _, _):
        crew = [Sailor(sea, worker, Mlp(), DILOCO, 200, lambda step: 0.004) for worker in range(2)]
        until(lambda: len(crew[0].log) > 6)
        crew.append(Sailor(sea, 2, Mlp(), DILOCO, 200, lambda step: 0.004))
        for sailor in crew:
            sailor.join()
    assert crew[2].entered[0] > 0
    shared = [step for step in crew[2].digests if step in crew[0].digests and step % 5 == 0]
    assert len(shared) > 5
    for step in shared:
        assert crew[2].digests[step] == crew[0].digests[step] == crew[1].digests[step]
    last = [event for _, event in crew[0].log if isinstance(event, Landed)][-1]
    assert last.peers == (0, 1, 2)


def test_nobody_waits_for_a_joiner_to_take_the_steps_that_the_others_have_taken(tmp_path: Path) -> None:
    strategy = Strategy((Rule(every(100), nesterov(0.7, 0.9), mixer=weighted(by_tokens(), all_mean())),))
    with coast(tmp_path, 2) as (sea, _, _):
        crew = [Sailor(sea, worker, Mlp(), strategy, 300, lambda step: 0.01) for worker in range(2)]
        until(lambda: len(crew[0].history) >= 150)
        crew.append(Sailor(sea, 2, Mlp(), strategy, 300, lambda step: 0.01))
        until(lambda: crew[2].entered != [])
        step = len(crew[0].history)
        for sailor in crew:
            sailor.join()
    assert step - 10 < crew[2].entered[0] < 200, "in the middle of a round"
    second, third = [event for _, event in crew[0].log if isinstance(event, Landed)][1:]
    assert second.weights == (8 * 100, 8 * 100, 8 * (200 - crew[2].entered[0]))
    assert third.weights == (8 * 100,) * 3
    assert len({sailor.digests[300] for sailor in crew}) == 1


@pytest.mark.parametrize("named", [5, None])
@pytest.mark.parametrize(("stands", "begins"), [((5, 3), 3), ((5, 5), 4), ((10, 7), 4)])
def test_a_joiner_has_a_step_left_before_its_boundary_however_far_the_others_are(
    stands: tuple[int, int], begins: int, named: int | None
) -> None:
    """The step that is named when it is ready is one after the others' last boundary, and says nothing of theirs."""
    both = Membership((0, 1), 0)
    donor, joiner = (SyncState(Mlp(), DILOCO, both, Work(0, 0)) for _ in range(2))
    offered = list[State]()
    offer(donor, SimpleNamespace(offer=lambda capture, due, step: offered.append(capture())))  # type: ignore[arg-type]
    ((meta, tensors),) = offered
    names, places = [named], [stands if named else (5, 1), stands]
    group = SimpleNamespace(
        joins=True,
        enter=lambda alike: (meta, dict(tensors)),
        begins=lambda: names[-1],
        stands=lambda: places.pop(0),
        ready=lambda: names.append(1),
    )
    enter(joiner, group)  # type: ignore[arg-type]
    assert (joiner.step, joiner.due) == (begins, 5)
    assert joiner.tracks[0].launched == joiner.work


def test_a_joiners_first_message_of_a_fragment_weighs_what_it_trained_itself(tmp_path: Path) -> None:
    rule = Rule(staggered(12, 2), sgd(0.8), mixer=weighted(by_tokens(), all_mean()), landing=After(1), merge=blend(0.5))
    strategy = Strategy((rule,), by_name("first*", "*"))
    with coast(tmp_path, 2) as (sea, _, _):
        crew = [Sailor(sea, worker, Mlp(), strategy, 200, lambda step: 0.004) for worker in range(2)]
        until(lambda: len(crew[0].log) > 6)
        crew.append(Sailor(sea, 2, Mlp(), strategy, 200, lambda step: 0.004))
        for sailor in crew:
            sailor.join()
    left = {event.key: step for step, event in crew[2].log if isinstance(event, Launched)}
    landings = [event for _, event in crew[2].log if isinstance(event, Landed) and event.key in left]
    first = {event.key.fragment: event for event in reversed(landings)}
    assert len(first) == 2
    assert min(event.weights[2] for event in first.values()) < 8 * 12, "it came in between two boundaries"
    for event in landings:
        since = crew[2].entered[0] if event == first[event.key.fragment] else left[event.key] - 12
        assert event.weights == (8 * 12, 8 * 12, 8 * (left[event.key] - since))


def test_an_island_whose_bits_have_changed_takes_over_those_of_the_others(tmp_path: Path) -> None:
    crew: list[Sailor] = []

    def strike(step: int) -> float:
        if step == 32 and len(crew[1].entered) == 1 and crew[1].sync:
            anchor = crew[1].sync.state.fragments[0].anchor
            assert anchor
            anchor.flat[0] += 1e-9
        return 0.004

    with coast(tmp_path, 3) as (sea, _, _):
        crew += [
            Sailor(sea, worker, Mlp(), DILOCO, 120, strike if worker == 1 else lambda step: 0.004)
            for worker in range(3)
        ]
        for sailor in crew:
            sailor.join()
    assert len(crew[1].entered) == 2, "it went on with other bits than the others"
    assert len({sailor.digests[120] for sailor in crew}) == 1
    assert all(isinstance(event, Landed) for _, event in crew[0].log if not isinstance(event, Launched))


def test_two_islands_that_differ_say_so_and_stop(tmp_path: Path) -> None:
    crew: list[Sailor] = []

    def strike(step: int) -> float:
        if step == 12 and crew[1].sync:
            anchor = crew[1].sync.state.fragments[0].anchor
            assert anchor
            anchor.flat[0] += 1e-9
        return 0.002

    with coast(tmp_path, 2) as (sea, _, _):
        crew += [
            Sailor(sea, worker, Mlp(), DILOCO, 40, strike if worker == 1 else lambda step: 0.002) for worker in range(2)
        ]
        for sailor in crew:
            sailor.thread.join(30)
    assert all("do not hold the same any more" in str(sailor.error) for sailor in crew)
