"""One worker's parameters go bad, under every method: NaN, infinite, or absurdly large.

What is not finite is refused whole wherever it is sent; what is absurd where at least four meet, for two or three have
no median to go by. Two methods have nothing to refuse: a single worker sends nothing, and data parallelism sends
gradients, which the poison of parameters reaches by way of the loss (see `test_refused`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

from atoll.recipes.methods import METHODS
from atoll.wire import Landed, Lost
from tests.properties.teams import Blocks, KeptTeam, Team, push

WORKERS, BAD, PERIOD = 8, 1, 3
"""`BAD` is who goes bad, at the end of its second round."""
CRITICAL = 2 * PERIOD


@dataclass
class Row:
    """How a method takes it.

    Args: heals: the step after which the bad worker's parameters are as good as the others'; absurd: the same for
    absurd ones, None where they get through to others, as in pairs. hears: who is told, of all others.
    """

    heals: int = CRITICAL
    absurd: int | None = CRITICAL
    hears: str = "all"
    knobs: dict[str, Any] | None = None


PAIRS = Row(hears="partner", absurd=None)
# whoever goes bad steps by its own delta at once, and is brought back when the points of all are mixed
MIXED = {
    "overlapped": Row(hears="nobody", absurd=CRITICAL + PERIOD, knobs={"period": PERIOD, "outer_momentum": 0.0}),
    "blocking": Row(hears="nobody"),
}
ROWS = {
    **dict.fromkeys(
        ("local-sgd", "diloco", "diloco-restarted", "opendiloco", "opendiloco-sparse", "sparseloco"), Row()
    ),
    "muloco": Row(knobs={"period": PERIOD, "bits": 4}),
    # fragments 0, 1 and 2 leave at steps 6, 8 and 10 and land a step later
    "streaming": Row(heals=11, absurd=11, knobs={"period": 6, "fragments": 2}),
    # an own delta is used at once, and taken back a round later
    "eager": Row(absurd=CRITICAL + PERIOD, knobs={"period": PERIOD, "outer_momentum": 0.0}),
    "sparta": Row(knobs={"fraction": 0.2}),
    "global-m1": MIXED["overlapped"],
    "global-m1-blocking": MIXED["blocking"],
    "factored-gossip": PAIRS,
    "global-m1-local-m2": PAIRS,
    "global-m1-local-m2-subset": PAIRS,
    "local-m1": Row(hears="nobody", absurd=None),
    "local-m1-m2": PAIRS,
    "local-m1-m2-subset": PAIRS,
    "local-m1-m2-blocking": PAIRS,
    "noloco": PAIRS,
    # fragments leave from step 6 to 10, and what they get lands a step later
    "decoupled": Row(heals=11, absurd=11, knobs={"period": 6, "fragments": 4}),
    "async-local-sgd": Row(hears="nobody", absurd=None),
}


def test_every_method_that_sends_parameters_or_what_became_of_them_has_a_row() -> None:
    assert {*ROWS} == {*METHODS} - {"single", "data-parallel"}


def poisoned(name: str, value: float) -> Iterator[Team | KeptTeam]:
    """The team after each step: `BAD` writes `value` into every tensor at one step, and everyone pushes on."""

    def move(worker: int, step: int, model: nn.Module) -> None:
        push(worker, step, model)
        if (worker, step) == (BAD, CRITICAL):
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.view(-1)[0] = value

    knobs = ROWS[name].knobs
    strategy = METHODS[name](**({"period": PERIOD} if knobs is None else knobs)).strategy
    paces = [Fraction(1)] * WORKERS
    team = KeptTeam(Blocks(), strategy, paces) if strategy.kept else Team(Blocks(), strategy, WORKERS)
    for _ in range(CRITICAL + 4 * PERIOD):
        yield team.run(1, move)


def good(model: nn.Module) -> bool:
    """Whether the parameters are of the size of the toy's, which start below 2."""
    trained = [tensor.detach() for tensor in model.parameters()]
    return all(bool(tensor.isfinite().all()) and float(tensor.abs().max()) < 5 for tensor in trained)


def told(team: Team | KeptTeam) -> set[int]:
    """The workers one of whose events speaks of `BAD`."""
    name = f"worker {BAD} "
    return {
        worker
        for worker, events in enumerate(team.events)
        for event in events
        if (isinstance(event, Landed) and any(name in sentence for sentence in event.refused))
        or (isinstance(event, Lost) and name in event.why)
    }


def finite_anchors(team: Team | KeptTeam) -> bool:
    anchors = [fragment.anchor for sync in team.syncs for fragment in sync.state.fragments]
    if isinstance(team, KeptTeam):
        anchors += team.keeping.anchors
    return all(bool(anchor.flat.isfinite().all()) for anchor in anchors if anchor)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ROWS)
def test_what_is_not_finite_is_refused_reported_and_healed(name: str, value: float) -> None:
    row = ROWS[name]
    for team in poisoned(name, value):
        step = team.syncs[0].state.step
        assert finite_anchors(team)
        assert all(good(model) for worker, model in enumerate(team.models) if worker != BAD)
        assert good(team.models[BAD]) == (step < CRITICAL or step >= row.heals), step
    assert BAD in told(team)
    assert len(told(team)) == {"all": WORKERS, "partner": 2, "nobody": 1}[row.hears]


REFUSED = [name for name, row in ROWS.items() if row.absurd is not None]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_absurd_is_refused_and_healed_where_four_meet(name: str) -> None:
    row = ROWS[name]
    assert row.absurd is not None
    for team in poisoned(name, 1e6):
        step = team.syncs[0].state.step
        assert finite_anchors(team)
        assert all(good(model) for worker, model in enumerate(team.models) if worker != BAD), step
        assert good(team.models[BAD]) == (step < CRITICAL or step >= row.absurd), step
    assert told(team) == set(range(WORKERS))


@pytest.mark.parametrize("name", [name for name in ROWS if name not in REFUSED])
def test_what_is_absurd_is_not_seen_by_two(name: str) -> None:
    """Nor by a keeper that steps at each contribution. It gets through to others, but stays a number."""
    reached = False
    for team in poisoned(name, 1e6):
        assert finite_anchors(team)
        reached = reached or not all(good(model) for worker, model in enumerate(team.models) if worker != BAD)
    assert reached
