"""Schedules of faults, drawn from a seed."""

import random
from dataclasses import dataclass

from atoll.parts.codecs import exact, float4
from atoll.parts.fragments import by_name
from atoll.parts.landings import After
from atoll.parts.merges import blend
from atoll.parts.mixers import all_mean
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every, staggered
from atoll.peers.wide.messages import COORDINATOR
from atoll.recipes.diloco import eager_diloco
from atoll.recipes.gossip import noloco
from atoll.sync.rule import Rule, Strategy
from atoll.wire import Keep, Reduce

METHODS: dict[str, Strategy] = {
    "diloco": Strategy((Rule(every(5), outer=nesterov(0.7, 0.9), mixer=all_mean(Reduce(exact()))),)),
    "streaming": Strategy(
        (Rule(staggered(6, 2), sgd(0.8), codec=float4(), mixer=all_mean(Keep()), landing=After(2), merge=blend(0.5)),),
        by_name("first*", "*"),
    ),
    "eager": eager_diloco(5).strategy,
    "noloco": noloco(5).strategy,
}
ROUTINE = ("Head", "Contribution", "Have", "Committed", "Mean", "Beat")
"""What passes when nothing is wrong."""
UPSET = ("Report", "Settle", "Gone", "Propose", "Promise", "Epoch", "Hello", "Fetch", "State", "Ready", *ROUTINE)


@dataclass(frozen=True)
class Fault:
    """What happens after `count` messages of a kind from `sender` (None: anybody) have passed.

    `what`: kill (and start again, unless it `lasts` for ever), freeze, cut (`who[0]` from `who[1]`), or coordinator
    (killed, and started again from its ledger). `lasts`: seconds. `drops`: what is sent meanwhile is lost.
    """

    what: str
    who: tuple[int, ...]
    kind: str
    sender: int | None
    count: int
    lasts: float
    drops: bool


@dataclass(frozen=True)
class Schedule:
    """`delays`: by (sender, hearer), seconds; at once, if none."""

    seed: int
    method: str
    workers: int
    serial: bool
    delays: tuple[tuple[tuple[int, int], float], ...]
    faults: tuple[Fault, ...]


def draw(seed: int, method: str | None = None) -> Schedule:
    """The schedule of a seed. Worker 0 is never killed or frozen, so somebody always knows the state."""
    rng = random.Random(seed)
    method = method or rng.choice([*METHODS])
    serial, workers = rng.random() < 0.4, rng.choice([3, 4, 4, 5])
    ends = [COORDINATOR, *range(workers)]
    slow = rng.random() < 0.6
    # between islands less than a round takes, or whoever joins never catches up
    delays = tuple(
        ((one, other), rng.choice([0.0, 0.0, 0.001, 0.004, 0.02 if COORDINATOR in (one, other) else 0.002]))
        for one in ends
        for other in ends
        if slow
    )
    faults: list[Fault] = []
    for index in range(rng.choice([1, 2, 2, 3])):
        kinds = ROUTINE if serial or not index else UPSET
        what = rng.choice(["kill", "kill", "kill", "freeze", "cut", "coordinator"])
        first = rng.randrange(1, workers)
        who = (first,)
        if what == "kill" and not serial and rng.random() < 0.25:
            who = tuple(sorted({first, rng.randrange(1, workers)}))
        if what == "cut":
            who = (first, rng.choice([worker for worker in range(workers) if worker != first]))
        kind = rng.choice(kinds)
        sender = {"Settle": COORDINATOR, "Gone": COORDINATOR, "Propose": COORDINATOR, "Epoch": COORDINATOR}.get(
            kind, rng.choice([None, first, rng.randrange(workers)])
        )
        lasts = rng.choice([0.0, 0.05, 0.3, 1.0, 1.5, 2.5])
        if what == "kill" and rng.random() < 0.2 and workers - len(faults) > 3:
            lasts = float("inf")
        faults.append(Fault(what, who, kind, sender, rng.randrange(1, 9), lasts, rng.random() < 0.5))
    return Schedule(seed, method, workers, serial, delays, tuple(faults))
