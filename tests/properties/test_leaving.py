"""How a run ends: what is in flight is used, and nobody is left waiting."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from torch import Tensor, nn

from atoll.errors import GroupError, ModelError
from atoll.parts.landings import After
from atoll.parts.merges import blend
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every, staggered
from atoll.peers.memory import Hub
from atoll.sync.rule import Rule, Strategy
from atoll.sync.synchronizer import Synchronizer
from atoll.testing.toys import Mlp
from atoll.trees import Layout, State
from atoll.wire import Landed
from tests.properties.teams import Team, push, same, shared, values

DILOCO = Strategy((Rule(every(3), outer=nesterov(0.7, 0.9)),))
STREAMING = Strategy((Rule(staggered(4, 1), outer=nesterov(0.7, 0.9), landing=After(3), merge=blend(0.5)),))
Outcome = BaseException | Synchronizer


def in_threads(
    workers: int, body: Callable[[int, Synchronizer], None], strategy: Strategy = DILOCO
) -> tuple[list[Outcome], float]:
    """Run `body` inside the block of each worker's synchronizer. Returns how each ended, and the seconds from the
    first end to the last."""
    hub = Hub(workers)
    outcomes: dict[int, Outcome] = {}
    ended: list[float] = []

    def work(worker: int) -> None:
        try:
            with Synchronizer(Mlp(), strategy, hub.group(worker)) as sync:
                body(worker, sync)
            outcomes[worker] = sync
        except BaseException as error:
            outcomes[worker] = error
        ended.append(time.monotonic())

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(outcomes) == workers, "a worker was left waiting"
    return [outcomes[worker] for worker in range(workers)], max(ended) - min(ended)


def train(sync: Synchronizer, worker: int, steps: int) -> None:
    for _ in range(steps):
        push(worker, sync.state.step + 1, sync.state.model)
        sync.after_step(tokens=1)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("strategy", [DILOCO, STREAMING])
def test_leaving_the_block_uses_what_is_in_flight_as_turns_do(strategy: Strategy, workers: int) -> None:
    syncs, _ = in_threads(workers, lambda worker, sync: train(sync, worker, 10), strategy)
    turns = Team(Mlp(), strategy, workers).run(10).drain()
    for sync, want in zip(syncs, turns.syncs, strict=True):
        assert isinstance(sync, Synchronizer), sync
        assert not sync.state.queue
        assert same(shared(sync), shared(want))
        assert same(values(sync.state.model), values(want.state.model))


@pytest.mark.parametrize("strategy", [DILOCO, STREAMING])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_leaving_by_an_exception_wakes_all_others_within_a_second(
    error: type[BaseException], strategy: Strategy
) -> None:
    def body(worker: int, sync: Synchronizer) -> None:
        train(sync, worker, 5)
        if worker == 1:
            time.sleep(0.2)
            raise error
        train(sync, worker, 100)

    outcomes, seconds = in_threads(3, body, strategy)
    assert isinstance(outcomes[1], error)
    for worker in (0, 2):
        assert isinstance(outcomes[worker], GroupError)
        assert "another worker failed" in str(outcomes[worker])
    assert seconds < 1


@dataclass(frozen=True)
class failing:
    """An outer optimizer that cannot do its third update."""

    def init(self, layout: Layout) -> State:
        return {}

    def update(self, GRADIENT: Tensor, STATE: State, anchor: Tensor, landed: Landed) -> Tensor:
        if landed.update == 3:
            raise ArithmeticError
        return GRADIENT


@pytest.mark.parametrize("late", [{}, {"landing": After(1), "merge": blend(0.5)}])
def test_an_outer_step_that_fails_ends_all_workers(late: dict[str, object]) -> None:
    strategy = Strategy((Rule(every(2), outer=failing(), **late),))  # pyright: ignore[reportArgumentType]
    outcomes, seconds = in_threads(3, lambda worker, sync: train(sync, worker, 50), strategy)
    assert all(isinstance(outcome, ArithmeticError | GroupError) for outcome in outcomes), outcomes
    assert any(isinstance(outcome, ArithmeticError) for outcome in outcomes)
    assert seconds < 1


def test_a_worker_that_fails_while_it_drains_does_not_leave_the_others_waiting() -> None:
    def body(worker: int, sync: Synchronizer) -> None:
        train(sync, worker, 6)
        if worker == 0:
            sync.state.model.float()
        else:
            time.sleep(0.2)
            train(sync, worker, 20)

    outcomes, seconds = in_threads(2, body, STREAMING)
    assert isinstance(outcomes[0], ModelError)
    assert isinstance(outcomes[1], GroupError)
    assert seconds < 1


def test_a_worker_that_trains_something_else_ends_those_who_are_there_already() -> None:
    hub, waiting = Hub(2), []

    def first() -> None:
        try:
            with Synchronizer(Mlp(), DILOCO, hub.group(0)) as sync:
                train(sync, 0, 10)
        except GroupError as error:
            waiting.append(error)

    thread = threading.Thread(target=first, daemon=True)
    thread.start()
    time.sleep(0.2)
    with pytest.raises(GroupError, match="build every worker's model from the same seed"):
        Synchronizer(Mlp(), STREAMING, hub.group(1))
    thread.join(timeout=1)
    assert len(waiting) == 1


def test_a_run_that_is_over_waits_for_nobody() -> None:
    """A lone worker, and workers that never had a rule, leave their blocks in turn in one thread."""
    for strategy, workers in ((STREAMING, 1), (Strategy(), 3)):
        hub = Hub(workers)
        for worker in range(workers):
            with Synchronizer(Mlp(), strategy, hub.group(worker)) as sync:
                train(sync, worker, 6)
            assert not sync.state.queue


def test_a_failure_in_one_turn_is_the_failure_of_the_run() -> None:
    rule = Rule(every(1), outer=sgd(1.0))
    team = Team(Mlp(), Strategy((rule,)), 2)

    def move(worker: int, step: int, model: nn.Module) -> None:
        if (worker, step) == (1, 3):
            raise InterruptedError
        push(worker, step, model)

    with pytest.raises(InterruptedError):
        team.run(5, move)
    assert len(team.landed()) == 2
