"""SyncState saved and restored, at any step, with exchanges in flight."""

import copy
import json
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import CheckpointError
from atoll.parts.codecs import exact
from atoll.parts.fragments import by_name
from atoll.parts.keepers import by_throughput, evenly, keeper
from atoll.parts.landings import After, OnArrival
from atoll.parts.merges import blend, carry_on, leave
from atoll.parts.mixers import all_mean, by_tokens, weighted
from atoll.parts.outers import adam, nesterov, sgd
from atoll.parts.schedules import every, staggered
from atoll.peers.faults import Dropping
from atoll.recipes.methods import METHODS
from atoll.sync.drive import take_turns
from atoll.sync.flow import resume, settle
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.testing import toys
from atoll.wire import Event
from tests.properties.teams import Blocks, KeptTeam, Move, Team, same
from tests.properties.test_refused import losing
from tests.properties.test_signals import adaptive

LAYERS = by_name("first.*", "[ml]*", "head.*")
STREAMING = Rule(
    staggered(5, 3),
    outer=nesterov(0.4, 0.9),
    landing=After(3),
    merge=blend(0.5),
    mixer=losing((1,), weighted(by_tokens(), all_mean())),
)
STRATEGIES = {
    "streaming, with a round lost": Strategy((STREAMING,), LAYERS),
    "outer adam, and live behind": Strategy(
        (
            Rule(every(4), outer=adam(0.3), only=(0, 2)),
            Rule(every(5), carry=Carry.LIVE, landing=After(2), merge=carry_on(), only=(1,)),
        ),
        LAYERS,
    ),
    "gradients, and a period by signal": Strategy(
        (Rule(every(3), carry=Carry.GRADIENT, merge=leave()), Rule(adaptive(2, 5), outer=nesterov(0.3, 0.5)))
    ),
}
STEPS = 18
Saved = list[tuple[str, dict[str, Tensor], dict[str, Any], dict[str, Any]]]


class Run:
    """A team, with an inner optimizer for each worker."""

    def __init__(
        self,
        strategy: Strategy,
        workers: int = 2,
        module: nn.Module | None = None,
        faults: Dropping | None = None,
    ) -> None:
        self.team = Team(module or toys.BufferedMlp(), strategy, workers, faults=faults)
        self.inner = [toys.adamw(model.parameters()) for model in self.team.models]

    def train(self, steps: int) -> None:
        backward: Move = lambda worker, step, model: toys.backward(model, 0, worker, step)  # noqa: E731
        self.team.run(
            steps,
            lambda worker, step, model: self.inner[worker].step(),
            backward=backward,
            tokens=lambda worker, step: 1 + step * (worker + 1),
            signals=lambda worker, step: {"x": (worker + step) / 9},
        )

    def save(self) -> Saved:
        """By worker: meta as JSON text, tensors of the state, the model, the inner optimizer."""
        self.team.settle()
        return [
            (
                json.dumps(sync.state.meta()),
                {name: tensor.clone() for name, tensor in sync.state.tensors()},
                copy.deepcopy(dict(sync.state.model.state_dict())),
                copy.deepcopy(inner.state_dict()),
            )
            for sync, inner in zip(self.team.syncs, self.inner, strict=True)
        ]

    def load(self, saved: Saved) -> "Run":
        for sync, inner, (meta, tensors, model, optimizer) in zip(self.team.syncs, self.inner, saved, strict=True):
            sync.state.model.load_state_dict(model)
            sync.state.load(json.loads(meta), tensors)
            inner.load_state_dict(copy.deepcopy(optimizer))
        return self


def alike(one: Saved, other: Saved) -> bool:
    return all(
        json.loads(a[0]) == json.loads(b[0])
        and same(a[1], b[1])
        and same(a[2], b[2])
        and all(same(a[3]["state"][key], b[3]["state"][key]) for key in a[3]["state"])
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_state_restored_at_any_step_goes_on_bit_for_bit(name: str) -> None:
    uninterrupted = Run(STRATEGIES[name])
    uninterrupted.train(STEPS)
    want, events, flying = uninterrupted.save(), uninterrupted.team.landed(), 0
    for step in range(STEPS):
        stopped = Run(STRATEGIES[name])
        stopped.train(step)
        saved = stopped.save()
        flying += len(stopped.team.syncs[0].state.queue)
        resumed = Run(STRATEGIES[name]).load(saved)
        assert resumed.team.step == step
        resumed.train(STEPS - step)
        assert alike(resumed.save(), want), step
        assert resumed.team.landed() == events[len(events) - len(resumed.team.landed()) :]
    assert flying or name.startswith("gradients")


KNOBS: dict[str, dict[str, Any]] = {
    "single": {},
    "data-parallel": {},
    "streaming": {"period": 4, "delay": 2},
    "muloco": {"period": 3, "bits": 4},
    "opendiloco-sparse": {"period": 3, "density": 0.2},
    "sparta": {"fraction": 0.1},
    "decoupled": {"period": 6, "fragments": 4},
}
MEETING = [name for name, make in METHODS.items() if not make().strategy.kept]
KEPT = [name for name in METHODS if name not in MEETING]


def strategy_of(name: str) -> Strategy:
    return METHODS[name](**KNOBS.get(name, {"period": 3})).strategy


@pytest.mark.parametrize("name", MEETING)
def test_every_method_restored_at_any_step_goes_on_bit_for_bit(name: str) -> None:
    """With eager deltas and points in flight, memories of codecs, and messages that are not heard."""
    steps = 11

    def start() -> Run:
        return Run(strategy_of(name), 3, Blocks(), Dropping(0.2, seed=1))

    uninterrupted, stopped = start(), start()
    uninterrupted.train(steps)
    events, want = uninterrupted.team.events, uninterrupted.save()
    flying = 0
    for step in range(steps):
        saved = stopped.save()
        flying += len(stopped.team.syncs[0].state.queue)
        resumed = start().load(saved)
        assert resumed.team.step == step
        resumed.train(steps - step)
        assert alike(resumed.save(), want), step
        for mine, all_ in zip(resumed.team.events, events, strict=True):
            assert repr(mine) == repr(all_[len(all_) - len(mine) :])
        stopped.train(1)
    overlaps = any(isinstance(rule.landing, After) for rule in strategy_of(name).rules)
    assert bool(flying) == overlaps


class KeptRun:
    """The same with a keeper. A checkpoint is written between two ticks."""

    def __init__(self, strategy: Strategy) -> None:
        self.team = KeptTeam(Blocks(), strategy, PACES, Dropping(0.2, seed=1))
        self.inner = [toys.adamw(model.parameters()) for model in self.team.models]

    def train(self, ticks: int) -> None:
        def move(worker: int, step: int, model: nn.Module) -> None:
            toys.backward(model, 0, worker, step)
            self.inner[worker].step()

        self.team.run(ticks, move)

    def save(self) -> tuple[int, Saved, str, dict[str, Tensor]]:
        """Ticks done, what is saved of each worker, and the keeper's meta and tensors."""
        team = self.team
        assert not team.turns.pending
        take_turns([settle(sync.state) for sync in team.syncs], team.groups)
        workers = [
            (
                json.dumps(sync.state.meta()),
                {name: tensor.clone() for name, tensor in sync.state.tensors()},
                copy.deepcopy(dict(sync.state.model.state_dict())),
                copy.deepcopy(inner.state_dict()),
            )
            for sync, inner in zip(team.syncs, self.inner, strict=True)
        ]
        kept = {name: tensor.clone() for name, tensor in team.keeping.tensors()}
        return team.tick, workers, json.dumps(team.keeping.meta()), kept

    def load(self, saved: tuple[int, Saved, str, dict[str, Tensor]]) -> "KeptRun":
        """Into a fresh run: its hub knows nothing, so what waited for the keeper is handed in again."""
        self.team.tick, workers, keeper_meta, kept = saved
        for sync, inner, (meta, tensors, model, optimizer) in zip(self.team.syncs, self.inner, workers, strict=True):
            sync.state.model.load_state_dict(model)
            sync.state.load(json.loads(meta), tensors)
            inner.load_state_dict(copy.deepcopy(optimizer))
        self.team.keeping.load(json.loads(keeper_meta), kept)
        take_turns([resume(sync.state) for sync in self.team.syncs], self.team.groups)
        return self

    def record(self) -> list[list[Event]]:
        return [*self.team.events, self.team.closed]


PACES = [Fraction(1), Fraction(2, 3), Fraction(1), Fraction(1, 2)]
LATE = keeper(3, 2, by_throughput(), nesterov(0.7, 0.9))
KEEPING = {name: strategy_of(name) for name in KEPT} | {
    # rounds that stay open over several ticks, so that checkpoints find them open
    "open rounds": Strategy(
        (Rule(staggered(5, 2), carry=Carry.LIVE, mixer=LATE, landing=OnArrival()),), by_name("embed.*", "*")
    ),
    "one after another": Strategy(
        (
            Rule(
                every(3),
                carry=Carry.LIVE,
                codec=exact(),
                mixer=keeper(2, 0, evenly(), nesterov(0.7, 0.9)),
                landing=OnArrival(),
            ),
        )
    ),
}


@pytest.mark.parametrize("name", KEEPING)
def test_a_keeper_and_its_workers_restored_at_any_tick_go_on_bit_for_bit(name: str) -> None:
    ticks = 13
    uninterrupted, stopped = (KeptRun(KEEPING[name]) for _ in range(2))
    uninterrupted.train(ticks)
    _, workers, meta, kept = uninterrupted.save()
    waiting = opened = 0
    for tick in range(ticks):
        saved = stopped.save()
        waiting += sum(entry.outcome is None for sync in stopped.team.syncs for entry in sync.state.queue)
        opened += any(track.joined for track in stopped.team.keeping.tracks)
        resumed = KeptRun(KEEPING[name]).load(saved)
        resumed.train(ticks - tick)
        _, again, meta_again, kept_again = resumed.save()
        assert alike(again, workers), tick
        assert json.loads(meta_again) == json.loads(meta)
        assert same(kept_again, kept)
        for mine, all_ in zip(resumed.record(), uninterrupted.record(), strict=True):
            assert repr(mine) == repr(all_[len(all_) - len(mine) :])
        stopped.train(1)
    assert name == "async-local-sgd" or waiting
    assert opened or name in KEPT


def test_settling_at_every_step_changes_no_bit() -> None:
    plain, settled = Run(STRATEGIES["streaming, with a round lost"]), Run(STRATEGIES["streaming, with a round lost"])
    for _ in range(STEPS):
        plain.train(1)
        settled.train(1)
        settled.team.settle()
    assert alike(plain.save(), settled.save())
    assert plain.team.events == settled.team.events


def test_what_is_saved_is_by_reference_and_what_is_loaded_is_copied() -> None:
    run = Run(STRATEGIES["streaming, with a round lost"])
    run.train(7)
    saved = run.save()
    resumed = Run(STRATEGIES["streaming, with a round lost"]).load(saved)
    resumed.train(5)
    assert alike(run.save(), saved)


class Renamed(toys.BufferedMlp):
    """The same numbers under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.top = self.head
        del self.head

    def children(self) -> Any:
        return iter([self.first, self.middle, self.last, self.top])


OTHERS = {
    "another period": Strategy((replace(STREAMING, schedule=staggered(6, 3)),), LAYERS),
    "another outer optimizer": Strategy((replace(STREAMING, outer=sgd(1.0)),), LAYERS),
    "other fragments": Strategy((STREAMING,), by_name("first.*", "m*", "*")),
    "no method": Strategy(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_state_of_another_method_is_refused_with_a_sentence_and_changes_nothing(name: str) -> None:
    saved, other = Run(Strategy((STREAMING,), LAYERS)), Run(OTHERS[name])
    saved.train(8)
    before = other.save()
    for sync, (meta, tensors, _, _) in zip(other.team.syncs, saved.save(), strict=True):
        with pytest.raises(CheckpointError, match=r"written by Strategy.* resume with its own method"):
            sync.state.load(json.loads(meta), tensors)
    assert alike(other.save(), before)


@pytest.mark.parametrize(
    "module", [toys.TiedMlp(), toys.BufferedMlp().float(), toys.Mlp(), Renamed(), toys.BufferedMlp()], ids=range(5)
)
def test_the_state_of_another_model_is_refused_with_a_sentence_and_changes_nothing(module: nn.Module) -> None:
    strategy = Strategy((Rule(every(3), outer=nesterov(0.7, 0.9)),))
    if type(module) is toys.BufferedMlp and module.first.weight.dtype == torch.float64:
        module.first.weight = nn.Parameter(module.first.weight.detach().t().contiguous().t())
    saved, other = Run(strategy), Run(strategy, module=module)
    saved.train(3)
    before = other.save()
    for sync, (meta, tensors, _, _) in zip(other.team.syncs, saved.save(), strict=True):
        with pytest.raises(CheckpointError, match=r"written with a model .* resume with its own model"):
            sync.state.load(json.loads(meta), tensors)
    assert alike(other.save(), before)


def test_a_state_that_lacks_a_tensor_is_refused_with_a_sentence() -> None:
    run = Run(Strategy((STREAMING,), LAYERS))
    run.train(7)
    ((meta, tensors, _, _), _) = run.save()
    for name in [*tensors]:
        damaged = {key: tensor for key, tensor in tensors.items() if key != name}
        fresh = Run(Strategy((STREAMING,), LAYERS)).team.syncs[0].state
        with pytest.raises(CheckpointError, match=r"has nothing where this run needs .* resume from the one before"):
            fresh.load(json.loads(meta), damaged)
