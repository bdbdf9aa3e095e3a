"""Gossip in which messages get lost, and meetings in which not everyone hears everyone."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from atoll.parts.estimates import as_landed, own
from atoll.parts.gossip import exponential, hypercube
from atoll.parts.landings import After, Blocking
from atoll.parts.merges import adopt, leave
from atoll.parts.mixers import Mixer, alone
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every
from atoll.peers.faults import Dropping
from atoll.recipes.methods import METHODS
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.testing import reference, toys
from atoll.wire import Key
from tests.equivalence.test_family import VARIANTS
from tests.properties.teams import Team, bits, close, mean, numbers, push, pushed, same, still, training, values
from tests.properties.test_leaving import in_threads, train

PERIOD = 3
OWN = Rule(every(PERIOD), outer=nesterov(0.7, 0.9), mixer=alone(), estimate=own())
"""Each worker steps by its own delta."""


def met(
    meetings: Callable[[int, int], list[tuple[int, ...]]], faults: Dropping, rule: int, workers: int
) -> Callable[[int], list[tuple[int, ...]]]:
    """(round) -> the meetings that come about: a pair both of whom are heard, or all who are, if more than half."""

    def groups(round: int) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for group in meetings(workers, round):
            lost = faults(Key(rule, 0, round), group) if len(group) > 1 else frozenset[int]()
            heard = tuple(worker for worker in group if worker not in lost)
            if len(heard) > len(group) / 2:
                found.append(heard)
        return found

    return groups


BLOCKING = {"global-m1-blocking": "global-m1", "local-m1-m2-blocking": "local-m1-m2"}


@pytest.mark.parametrize("workers", [4, 5])
@pytest.mark.parametrize("name", [*VARIANTS, *BLOCKING])
def test_gossip_with_lost_messages_is_its_plain_loop_in_which_those_who_are_not_heard_meet_nobody(
    name: str, workers: int
) -> None:
    faults, module, steps = Dropping(0.3, seed=workers), toys.Mlp(), 8 * PERIOD
    one, two = (
        met(meetings, faults, rule, workers) for rule, meetings in enumerate(VARIANTS[BLOCKING.get(name, name)])
    )
    loop = reference.blocking_gossip if name in BLOCKING else reference.factored_gossip
    _, live = loop(
        toys.initial(module),
        workers=workers,
        steps=steps,
        inner_step=toys.inner_step(module, toys.adamw, seed=0),
        period=PERIOD,
        mix1=lambda round: one(round - 1),
        mix2=lambda round, tensor: two(round),
        outer=reference.nesterov(0.7, 0.9),
    )
    strategy = METHODS[name](period=PERIOD).strategy
    team = Team(module, strategy, workers, faults=faults).run(steps, **training(toys.adamw))
    for model, want in zip(team.models, live, strict=True):
        assert toys.same_bits(list(values(model).values()), want)
    assert any(team.lost(worker) or any(each.dropped for each in team.landed(worker)) for worker in range(workers))


@pytest.mark.parametrize("workers", [4, 5])
def test_noloco_with_lost_messages_is_its_plain_loop_too(workers: int) -> None:
    faults, module, steps = Dropping(0.3, seed=workers), toys.Mlp(), 8 * PERIOD
    pairs_met = met(VARIANTS["factored-gossip"][1], faults, 0, workers)
    _, live = reference.noloco(
        toys.initial(module),
        workers=workers,
        steps=steps,
        inner_step=toys.inner_step(module, toys.adamw, seed=0),
        period=PERIOD,
        pairs=pairs_met,
        lr=0.7,
        momentum=0.5,
        pull=0.7,
    )
    strategy = METHODS["noloco"](period=PERIOD).strategy
    team = Team(module, strategy, workers, faults=faults).run(steps, **training(toys.adamw))
    for model, want in zip(team.models, live, strict=True):
        assert toys.same_bits(list(values(model).values()), want)


def test_a_pair_of_which_one_is_not_heard_goes_on_as_two_who_are_alone_and_says_so() -> None:
    """The mean over workers of what they step by is as if they had met."""
    strategy = METHODS["local-m1-m2"](period=PERIOD, outer_momentum=0.0).strategy
    faults = Dropping(0.3, seed=0)
    team = Team(numbers(), strategy, 6, faults=faults).run(8 * PERIOD)
    unmixed = Team(numbers(), Strategy((replace(strategy.rules[1], mixer=alone()),)), 6).run(8 * PERIOD)
    assert close(mean(team.anchors()), mean(unmixed.anchors()), 1e-14)
    for worker in range(6):
        for lost in team.lost(worker):
            assert "1 of 2 contributions count" in lost.why or "0 of 2 contributions count" in lost.why
            assert "was not heard" in lost.why
            assert ("goes on with its own delta" in lost.why) == (lost.key.rule == 1)
    assert team.lost()


def test_what_a_worker_keeps_to_itself_cannot_get_lost() -> None:
    for workers, rule in ((3, replace(OWN, estimate=as_landed())), (1, Rule(every(PERIOD), outer=sgd(1.0)))):
        team = Team(numbers(), Strategy((rule,)), workers, faults=Dropping(0.9)).run(4 * PERIOD)
        assert [len(team.landed(worker)) for worker in range(workers)] == [4] * workers


# Not everyone hears everyone


def mixing(mixer: Mixer, *, blocks: bool) -> Strategy:
    """Points are mixed, behind the inner steps or while training waits; deltas stay one's own."""
    late = {"landing": Blocking(), "merge": adopt()} if blocks else {"landing": After(PERIOD), "merge": leave()}
    points = Rule(every(PERIOD), carry=Carry.ANCHOR, mixer=mixer, **late)  # pyright: ignore[reportArgumentType]
    return Strategy((points, OWN))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("workers", [2, 3, 5, 6, 8])
def test_directed_mixing_keeps_the_mean_over_workers(workers: int, blocks: bool) -> None:
    team = Team(toys.Mlp(), mixing(exponential(), blocks=blocks), workers).run(8 * PERIOD)
    unmixed = Team(toys.Mlp(), mixing(alone(), blocks=blocks), workers).run(8 * PERIOD)
    assert close(mean(team.anchors()), mean(unmixed.anchors()), 1e-14)
    assert not close(team.anchors()[0], unmixed.anchors()[0], 1e-3)


@pytest.mark.parametrize("mixer", [exponential(), hypercube()])
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_points_are_the_mean_of_all_after_log2_of_the_workers_rounds(workers: int, mixer: Mixer) -> None:
    apart = Team(toys.Mlp(), Strategy((OWN,)), workers).run(PERIOD).anchors()
    points = Rule(every(PERIOD), carry=Carry.ANCHOR, mixer=mixer)
    team = Team(toys.Mlp(), Strategy((points,)), workers)
    for sync, point in zip(team.syncs, apart, strict=True):
        anchor = sync.state.fragments[0].anchor
        assert anchor is not None
        anchor.flat.copy_(point)
    rounds = workers.bit_length() - 1
    team.run((rounds - 1) * PERIOD, still)
    assert not any(close(anchor, mean(apart)) for anchor in team.anchors())
    team.run(PERIOD, still)
    assert all(close(anchor, mean(apart), 1e-14) for anchor in team.anchors())


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("workers", [3, 4])
def test_directed_mixing_gives_the_same_bits_in_turns_and_in_threads(workers: int, blocks: bool) -> None:
    strategy = mixing(exponential(), blocks=blocks)
    syncs, _ = in_threads(workers, lambda worker, sync: train(sync, worker, 10), strategy)
    turns = Team(toys.Mlp(), strategy, workers).run(10).drain()
    for sync, want, model in zip(syncs, turns.anchors(), turns.models, strict=True):
        assert not isinstance(sync, BaseException), sync
        anchor = sync.state.fragments[0].anchor
        assert anchor is not None
        assert bits(anchor.flat) == bits(want)
        assert same(values(sync.state.model), values(model))


def test_a_worker_that_hears_nobody_has_lost_its_round() -> None:
    """Workers 1 and 2 are refused, and each hears only itself and the one before: nothing counts for worker 2."""

    def move(worker: int, step: int, model: nn.Module) -> None:
        push(worker, step, model)
        if worker in (1, 2):
            model.get_parameter("w").data[0] = float("nan")

    rule = Rule(every(1), outer=sgd(1.0), mixer=exponential())
    team = Team(numbers(), Strategy((rule,)), 6).run(1, move)
    start = numbers().w.detach()
    for worker, (anchor, heard) in enumerate(
        zip(team.anchors(), [(0, 5), (0,), (), (3,), (3, 4), (4, 5)], strict=True)
    ):
        if heard:
            assert team.landed(worker)[0].peers == heard
            assert close(anchor, start + sum(pushed(each, 1) for each in heard) / len(heard), 1e-14)
        else:
            assert f"nothing that worker {worker} hears counts" in team.lost(worker)[0].why
            assert torch.equal(anchor, start)
