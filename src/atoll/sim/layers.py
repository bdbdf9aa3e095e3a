"""Layers within a step: how busy a link keeps the workers waiting, finer than whole steps can tell.

A step of L layers is 3 L - 1 equal slots of compute, one after another: forward of layers 0 to L - 1; then, from the
last layer to the first, the gradient of the layer's activations and the gradient of its parameters. (The first layer
passes no gradient on.) With L transfers these are the 4 L - 1 nodes of the published simulator (Streaming DiLoCo,
Douillard et al. 2025, compute utilisation).

    forward 0 ... L-1 | activations L-1, parameters L-1 | ... | activations 1, parameters 1 | parameters 0

Each layer is a transfer of its own: it may leave when its gradient is there, and the first forward that reads what
came back waits for it. Transfers take the link one after another, in the order they leave in. All workers are alike
and do the same at the same time, so one link in one direction stands for all of them: what a worker sends has come
when its like from everyone else has. A transfer is `bits` for each parameter of the layer, whatever the number of
workers. Latency, encoding and the outer step are not counted.

Only slots in which something leaves or is waited for are visited, so long rounds cost as little as short ones.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from atoll.errors import UsageError
from atoll.parts.schedules import staggered

GRID = tuple(1e9 * 10 ** (-1 + 4 * point / 49) for point in range(50))
"""The bandwidths of the published tables: 50 points from 0.1 to 1000 Gbit/s, each 1.207 times the last."""


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise UsageError(f"{name} was {value}, which no run can have; give {name} > 0")


@dataclass(frozen=True)
class Model:
    """What the link sees of a model: `layers` alike, `parameters` in all, `step_s` seconds of an inner step."""

    layers: int
    parameters: float
    step_s: float

    def __post_init__(self) -> None:
        _positive(layers=self.layers, parameters=self.parameters, step_s=self.step_s)


class Exchange(NamedTuple):
    """One layer in one round: the inner steps, from 0, in whose backward it leaves and whose forward waits for it."""

    leaves: int
    read: int


class Method(Protocol):
    """When layers leave and are read, and how wide they travel."""

    @property
    def period(self) -> int:
        """H: inner steps of a round, in which each layer leaves once."""
        ...

    @property
    def bits(self) -> float:
        """On the wire for each parameter."""
        ...

    def exchanges(self, layers: int) -> tuple[Exchange, ...]:
        """That of each layer."""
        ...


@dataclass(frozen=True)
class diloco:
    """All layers leave in the last backward of a round, and the next forward waits for them."""

    period: int
    bits: float

    def __post_init__(self) -> None:
        _positive(period=self.period, bits=self.bits)

    def exchanges(self, layers: int) -> tuple[Exchange, ...]:
        """All alike."""
        return (Exchange(self.period - 1, self.period),) * layers


def data_parallel(bits: float) -> diloco:
    """Gradients of all layers leave in each step: the link cannot tell it from DiLoCo with a period of 1."""
    return diloco(1, bits)


@dataclass(frozen=True)
class streaming:
    """P strided fragments of `fragment` layers take turns; the embedding has a turn too, whose parameters are counted
    with the layers (Streaming DiLoCo, section 3: fragments of 3 layers, landing after 0 or 1 inner steps).

    Turns begin floor(p H / (P + 1)) steps into a round, as in the schedule `staggered`; the paper seems to take p times
    floor(H / (P + 1)), which gives the same numbers in every published cell.

    Args:
        period: H. bits: on the wire for each parameter. fragment: layers of a fragment, the last ones may have less.
        delay: inner steps from leaving to landing, as in `After`; 0 makes the next forward wait.
    Raises: CompositionError where H < P + 1.
    """

    period: int
    bits: float
    fragment: int = 3
    delay: int = 0

    def __post_init__(self) -> None:
        _positive(period=self.period, bits=self.bits, fragment=self.fragment)
        if self.delay < 0:
            raise UsageError(f"delay was {self.delay}, but nothing lands before it left; give delay >= 0")

    def exchanges(self, layers: int) -> tuple[Exchange, ...]:
        """Those of a fragment alike."""
        fragments = -(-layers // self.fragment)
        turns = staggered(self.period, fragments + 1)
        starts = [turns.offset(layer % fragments) for layer in range(layers)]
        return tuple(Exchange(start, start + 1 + self.delay) for start in starts)


@dataclass(frozen=True)
class Timing:
    """Seconds of a steady round: of compute alone, and in all, with the waits."""

    compute_s: float
    total_s: float

    @property
    def utilisation(self) -> float:
        """Part of the time that the worker computes, in (0, 1]."""
        return self.compute_s / self.total_s


class _Event(NamedTuple):
    """A layer leaves once `slot` slots of its round are done, or is waited for then, `lag` rounds after it left."""

    slot: int
    layer: int
    lag: int | None


def _events(model: Model, method: Method) -> list[_Event]:
    """Those of one round in order."""
    step = 3 * model.layers - 1
    exchanges = method.exchanges(model.layers)
    # Layer 0 has one slot of backward and not two, so its gradient is there when the step ends.
    gradient = [min(3 * model.layers - 2 * layer, step) for layer in range(model.layers)]
    leaves = [_Event(each.leaves * step + gradient[layer], layer, None) for layer, each in enumerate(exchanges)]
    reads = [
        _Event(each.read % method.period * step + layer, layer, each.read // method.period)
        for layer, each in enumerate(exchanges)
    ]
    # The sort is stable: what leaves at the end of a step does so before the next step waits for anything.
    return sorted(leaves + reads, key=lambda event: event.slot)


def timing(model: Model, method: Method, rate: float) -> Timing:
    """Compute how long a steady round of `method` takes on a link of `rate` bits per second (it may be infinite).

    Example:
        >>> timing(Model(layers=1, parameters=1e9, step_s=0.1), diloco(10, bits=16), 16e9)
        Timing(compute_s=1.0, total_s=2.0)
    """
    _positive(rate=rate)
    events = _events(model, method)
    slot = model.step_s / (3 * model.layers - 1)
    compute = method.period * model.step_s
    transfer = model.parameters / model.layers * method.bits / rate
    lag = max(event.lag or 0 for event in events)
    # A link that starts out idle and is a little too slow fills up over hundreds of rounds before anyone waits. One
    # that starts with more than can ever be in flight is steady after the first round that reads what left.
    free = (lag + 1) * compute
    waited = before = 0.0
    landed: dict[tuple[int, int], float] = {}
    for number in range(lag + 2):
        before = waited
        for event in events:
            now = number * compute + event.slot * slot + waited
            if event.lag is None:
                free = max(free, now) + transfer
                landed[number, event.layer] = free
            else:
                waited += max(0.0, landed.get((number - event.lag, event.layer), 0.0) - now)
    return Timing(compute, compute + (waited - before))


def utilisation(model: Model, method: Method, rate: float) -> float:
    """Part of the time that workers compute, on links of `rate` bits per second, in (0, 1]."""
    return timing(model, method, rate).utilisation


def required(model: Model, method: Method, target: float) -> float | None:
    """The first bandwidth of `GRID`, in bits per second, whose utilisation is `target` at least; None if it is above.

    Example:
        >>> required(Model(layers=24, parameters=1e9, step_s=0.1), diloco(100, bits=13), 0.5) == GRID[14]
        True
    """
    point = bisect_left(GRID, target, key=lambda rate: utilisation(model, method, rate))
    return GRID[point] if point < len(GRID) else None
