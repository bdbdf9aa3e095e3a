"""What does a method cost in the inner steps between its boundaries?

One worker of four calls `after_step` again and again while nothing is due; the model has 100 parameter tensors.
"""

import inspect
from collections.abc import Callable, Iterator

from atoll.peers.memory import Hub
from atoll.recipes.methods import METHODS
from atoll.sync.synchronizer import Synchronizer
from bench.measure import Figure, in_turns
from bench.toys import transformer

FAR = 1 << 40
"""A period that no bench reaches."""
GOAL = 5.0
"""Microseconds."""


def figures(calls: int = 2000, turns: int = 15, layers: int = 11) -> Iterator[Figure]:
    """Microseconds per call of every method that rests between boundaries; one that syncs at every step never does."""
    syncs = {name: _synchronizer(name, layers) for name in METHODS}
    resting = {name: sync for name, sync in syncs.items() if sync.state.due > 1}
    actions = [_calls(sync, calls) for sync in resting.values()]
    for name, seconds in zip(resting, in_turns(actions, turns), strict=True):
        yield Figure(name, [1e6 * taken / calls for taken in seconds], "us per call", most=GOAL)


def _synchronizer(name: str, layers: int) -> Synchronizer:
    make = METHODS[name]
    method = make(period=FAR) if "period" in inspect.signature(make).parameters else make()
    return Synchronizer(transformer(16, layers, 256), method.strategy, Hub(4).group(0))


def _calls(sync: Synchronizer, calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            sync.after_step(tokens=1)

    return run
