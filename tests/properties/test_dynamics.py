"""Messages that get lost, and workers of unequal precision.

What is lost is drawn from a seed, so that plain loops can be told of it beforehand.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.parts.codecs import cast, error_feedback, exact, quantise, topk
from atoll.parts.estimates import eager
from atoll.parts.landings import After
from atoll.parts.merges import blend
from atoll.parts.mixers import all_mean, by_tokens, weighted
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every
from atoll.peers.faults import Dropping
from atoll.recipes.methods import METHODS
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.testing import reference, toys
from atoll.wire import Codec, Keep, Key, Landed, Lost
from tests.properties.teams import (
    Blocks,
    Team,
    bits,
    close,
    examples,
    numbers,
    push,
    pushed,
    same,
    shared,
    training,
    values,
)

PERIOD = 3
DILOCO = Rule(every(PERIOD), outer=nesterov(0.7, 0.9))
SEEDS = st.integers(0, 1000)


See = Callable[[Tensor], Tensor]
"""What the others see of a delta."""


ROUNDS = 8
LATE = replace(DILOCO, landing=After(1), merge=blend(0.0))
"""The same a step later, which is thrown away."""


def pausing(worker: int, step: int, model: nn.Module) -> None:
    """`push`, but at no step in which an exchange may be in flight."""
    if step == 1 or step % PERIOD != 1:
        push(worker, step, model)


def plain_diloco(
    workers: int, faults: Dropping, memory: Callable[[], reference.ErrorFeedback] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """DiLoCo in which whoever is not heard keeps its live parameters; with a memory its delta waits there instead.

    Workers pause. A round in which not more than half are heard does not count, and nobody moves.
    """
    anchor = numbers().w.detach().clone()
    live = [anchor.clone() for _ in range(workers)]
    momentum = torch.zeros_like(anchor)
    memories = [memory() if memory else None for _ in range(workers)]
    for step in range(1, ROUNDS * PERIOD + 1):
        for worker in range(workers):
            if step == 1 or step % PERIOD != 1:
                live[worker] = live[worker] + pushed(worker, step)
        if step % PERIOD:
            continue
        lost = faults(Key(0, 0, step // PERIOD - 1), range(workers))
        if not workers - len(lost) > workers / 2:
            continue
        seen: list[Tensor] = []
        for worker, codec in enumerate(memories):
            delta = anchor - live[worker]
            if worker not in lost:
                seen.append(codec(delta) if codec else delta)
            elif codec:
                waiting = 0 if codec.residual is None else codec.residual * codec.decay
                codec.residual = waiting + delta
        gradient = sum(seen[1:], seen[0]) / len(seen)
        momentum = momentum * 0.9 + gradient
        anchor = anchor - (gradient + momentum * 0.9) * 0.7
        for worker, codec in enumerate(memories):
            if worker not in lost or codec:
                live[worker] = anchor.clone()
    return anchor, live


@pytest.mark.parametrize("rule", [DILOCO, LATE], ids=["at once", "late"])
@examples(6)
@given(workers=st.integers(2, 6), probability=st.sampled_from([0.1, 0.3, 0.6]), seed=SEEDS)
def test_a_worker_that_is_not_heard_keeps_its_live_and_its_anchor_goes_with_the_others(
    rule: Rule, workers: int, probability: float, seed: int
) -> None:
    faults = Dropping(probability, seed)
    team = Team(numbers(), Strategy((rule,)), workers, faults=faults).run(ROUNDS * PERIOD + 1, pausing)
    anchor, live = plain_diloco(workers, faults)
    for sync, model, want in zip(team.syncs, team.models, live, strict=True):
        assert close(shared(sync)["w"], anchor, 1e-14)
        assert close(values(model)["w"], want, 1e-14)
    assert len({sync.state.digest() for sync in team.syncs}) == 1


def test_what_a_lost_message_leaves_alone_keeps_its_bits() -> None:
    team = Team(toys.Mlp(), Strategy((DILOCO,)), 4, faults=Dropping(0.3, seed=1))
    alone_, heard = 0, 0
    for _ in range(10):
        before: dict[int, list[bytes]] = {}

        def move(worker: int, step: int, model: nn.Module, before: dict[int, list[bytes]] = before) -> None:
            push(worker, step, model)
            before[worker] = [bits(tensor) for tensor in model.parameters()]

        team.run(PERIOD, move)
        for worker, (model, sync) in enumerate(zip(team.models, team.syncs, strict=True)):
            event = team.events[worker][-1]
            kept = isinstance(event, Lost) or (isinstance(event, Landed) and worker in event.dropped)
            alone_ += isinstance(event, Landed) and kept
            heard += not kept
            now = [bits(tensor) for tensor in model.parameters()]
            assert now == before[worker] if kept else same(values(model), shared(sync))
        assert len({sync.state.digest() for sync in team.syncs}) == 1
    assert alone_
    assert heard


AGREEING: dict[str, Strategy] = {
    "late": Strategy((replace(DILOCO, landing=After(1), merge=blend(0.5)),)),
    "live": Strategy((Rule(every(PERIOD), carry=Carry.LIVE),)),
    "live beside deltas": Strategy((replace(DILOCO, schedule=every(4)), Rule(every(PERIOD), carry=Carry.LIVE))),
    "streaming": METHODS["streaming"](period=6).strategy,
    "sparse": METHODS["opendiloco-sparse"](period=PERIOD, density=0.3).strategy,
    "averaged buffers": Strategy((DILOCO,)),
}


@pytest.mark.parametrize("name", AGREEING)
def test_where_workers_agree_they_agree_whatever_gets_lost(name: str) -> None:
    module = toys.BufferedMlp() if name == "averaged buffers" else Blocks()
    team = Team(module, AGREEING[name], 4, faults=Dropping(0.3, seed=2))
    for _ in range(24):
        team.run(1, **training(toys.sgd))
        assert {bits(tensor) for tensor in team.anchors()} == {bits(team.anchors()[0])}
    assert any(landed.dropped for landed in team.landed())
    assert team.syncs[0].state.strategy.agrees


def test_what_was_learned_in_a_round_that_was_not_heard_weighs_in_the_next() -> None:
    """By tokens: the delta after it holds both rounds."""
    rule = Rule(every(2), outer=sgd(1.0), mixer=weighted(by_tokens(), all_mean()))
    faults, workers = Dropping(0.3, seed=2), 4
    team = Team(numbers(), Strategy((rule,)), workers, faults=faults).run(16)
    waiting = [0] * workers
    for round in range(8):
        waiting = [tokens + 2 for tokens in waiting]
        heard = [worker for worker in range(workers) if worker not in faults(Key(0, 0, round), range(workers))]
        found = [landed for landed in team.landed() if landed.key.round == round]
        if len(heard) > workers / 2:
            assert found[0].peers == tuple(heard)
            assert found[0].weights == tuple(waiting[worker] for worker in heard)
            waiting = [0 if worker in heard else tokens for worker, tokens in enumerate(waiting)]
        else:
            assert not found
    assert max(max(landed.weights) for landed in team.landed()) > 2


MEMORIES: dict[str, tuple[Codec, See, float]] = {
    "topk": (topk(8, 32), reference.topk(8, 32), 1.0),
    "topk, decaying": (topk(8, 32), reference.topk(8, 32), 0.75),
    "quantised": (quantise(4, block=32), reference.quantise_linear(4, 32), 1.0),
}


@pytest.mark.parametrize("rule", [DILOCO, LATE], ids=["at once", "late"])
@pytest.mark.parametrize("name", MEMORIES)
@examples(3)
@given(workers=st.integers(3, 5), seed=SEEDS)
def test_with_error_feedback_a_delta_that_was_lost_is_put_aside_and_sent_later(
    name: str, rule: Rule, workers: int, seed: int
) -> None:
    codec, seen, decay = MEMORIES[name]
    rule = replace(rule, codec=error_feedback(codec, decay), mixer=all_mean(Keep()))
    faults = Dropping(0.3, seed)
    team = Team(numbers(), Strategy((rule,)), workers, faults=faults).run(ROUNDS * PERIOD + 1, pausing)
    anchor, live = plain_diloco(workers, faults, lambda: reference.ErrorFeedback(seen, decay))
    for sync, model, want in zip(team.syncs, team.models, live, strict=True):
        assert close(shared(sync)["w"], anchor)
        assert close(values(model)["w"], want)


# Eager updates


def apart(team: Team, deltas: list[Tensor]) -> float:
    """How far anchors are from being apart by their newest own parts only: by (D_n - D_m) / M, for outer sgd(1)."""
    anchors, workers = team.anchors(), len(deltas)
    return max(
        float((anchors[m] - anchors[n] + (deltas[m] - deltas[n]) / workers).norm())
        for m in range(workers)
        for n in range(workers)
    )


@pytest.mark.parametrize("codec", [exact(), cast(torch.float16), error_feedback(topk(8, 32), 1.0)], ids=range(3))
@pytest.mark.parametrize("probability", [0.0, 0.2, 0.5])
def test_eager_anchors_are_apart_by_the_newest_own_part_only_whatever_gets_lost(
    codec: Codec, probability: float
) -> None:
    rule = Rule(every(PERIOD), outer=sgd(1.0), landing=After(PERIOD), estimate=eager(), codec=codec)
    team = Team(numbers(), Strategy((rule,)), 4, faults=Dropping(probability, seed=1))
    for _ in range(12):
        deltas: dict[int, Tensor] = {}

        def move(worker: int, step: int, model: nn.Module, deltas: dict[int, Tensor] = deltas) -> None:
            push(worker, step, model)
            deltas[worker] = team.anchors()[worker] - model.get_parameter("w").detach()

        team.run(PERIOD, move)
        assert apart(team, [deltas[worker] for worker in range(4)]) < 1e-14
    assert bool(team.lost() or any(each.dropped for each in team.landed())) == bool(probability)
    team.drain()
    assert all(close(anchor, team.anchors()[0], 1e-14) for anchor in team.anchors())


# Bits


@pytest.mark.parametrize("name", ["diloco", "streaming", "eager", "factored-gossip", "noloco", "sparseloco", "sparta"])
def test_the_same_seed_loses_the_same_messages_and_gives_the_same_bits(name: str) -> None:
    strategy = METHODS[name]().strategy if name == "sparta" else METHODS[name](period=6).strategy
    one, two, other = (
        Team(Blocks(), strategy, 4, faults=Dropping(0.2, seed)).run(24, **training(toys.adamw)) for seed in (5, 5, 6)
    )
    assert [same(values(a), values(b)) for a, b in zip(one.models, two.models, strict=True)] == [True] * 4
    assert one.events == two.events
    assert not same(values(one.models[0]), values(other.models[0]))


PRECISE = {
    "diloco": Strategy((DILOCO,)),
    "streaming": METHODS["streaming"](period=6, delay=2).strategy,
}


@pytest.mark.parametrize("name", PRECISE)
def test_workers_of_unequal_precision_have_anchors_of_the_same_bits(name: str) -> None:
    """fp32 and bf16 live parameters, alike at the start."""
    narrow = Blocks().to(torch.bfloat16)
    wide = Blocks().to(torch.bfloat16).float()
    team = Team([wide, narrow, wide], PRECISE[name], 3)
    before = team.syncs[0].state.digest()
    for _ in range(24):
        team.run(1)
        assert len({sync.state.digest() for sync in team.syncs}) == 1
    assert team.syncs[0].state.digest() != before
    assert [next(model.parameters()).dtype for model in team.models] == [torch.float32, torch.bfloat16, torch.float32]
    if name == "diloco":
        for tensor, rounded in zip(*(model.parameters() for model in team.models[:2]), strict=True):
            assert torch.equal(tensor.to(torch.bfloat16), rounded)
