"""What a strategy sends, when it leaves and lands, and how long a link takes: from shapes alone, without training."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from atoll.parts.codecs import exact
from atoll.parts.landings import OnArrival
from atoll.parts.mixers import Situation, Work, all_mean, weighted
from atoll.sync.rule import Carry, Rule, Strategy, layout_of
from atoll.sync.state import message
from atoll.trees import Layout, averaged_buffers, spec_of, trainable
from atoll.wire import Fold, Keep, Membership, Reduce, bytes_sent


@dataclass(frozen=True)
class Exchanges:
    """All exchanges of one fragment under one rule in a run.

    Args:
        rule, fragment: their numbers. names: of the tensors. parameters: elements of all of them.
        carry: what a message holds. fold: how contributions are combined; why: and why so.
        nbytes: that a worker sends in one exchange without its header (worker 0; others may send a rounding less).
        leaves: inner steps after which one leaves. delay: inner steps until it lands, 0 where training waits for it,
            None where it lands when it comes.
        seconds: that one exchange takes on the link, or None where no bandwidth was given.
    """

    rule: int
    fragment: int
    names: tuple[str, ...]
    parameters: int
    carry: Carry
    nbytes: int
    fold: Fold
    why: str
    leaves: tuple[int, ...]
    delay: int | None
    seconds: float | None


@dataclass(frozen=True)
class Explanation:
    """What a run of `steps` inner steps exchanges.

    Args:
        exchanges: by rule and fragment. nbytes: that a worker sends in all.
        blocked: part of the run's time that a worker waits for the link (None without bandwidth and step time).
    """

    steps: int
    exchanges: tuple[Exchanges, ...]
    nbytes: int
    blocked: float | None


def explain(
    model: nn.Module,
    strategy: Strategy,
    *,
    workers: int,
    steps: int,
    rate: float | None = None,
    step_time: float | None = None,
) -> Explanation:
    """Compute what `strategy` exchanges of `model`, by its shapes and dtypes alone: it may be on the meta device.

    A worker sends and receives at `rate` at the same time, and its exchanges take the link one after another. Latency,
    encoding and the outer step are not counted.

    Args:
        workers: k. steps: inner steps of the run.
        rate: bits per second of each worker's link. step_time: seconds of an inner step.
    Raises: CompositionError if strategy and model do not fit.

    Example:
        >>> import torch
        >>> from atoll.parts.outers import sgd
        >>> from atoll.parts.schedules import every
        >>> with torch.device("meta"):
        ...     model = nn.Linear(1000, 1000, bias=False)
        >>> explained = explain(model, Strategy((Rule(every(10), outer=sgd(1.0)),)), workers=4, steps=40, rate=1e9)
        >>> explained.nbytes, explained.exchanges[0].seconds
        (24000000, 0.048)
    """
    exchanges = tuple(
        _exchanges(index, rule, number, layout, workers=workers, rate=rate, leaves=_due(rule, turn, steps))
        for index, rule, number, turn, layout in _pairs(model, strategy)
    )
    blocked = None
    if rate and step_time:
        waiting = _waiting(exchanges, steps, step_time)
        blocked = waiting / (waiting + steps * step_time)
    return Explanation(steps, exchanges, sum(each.nbytes * len(each.leaves) for each in exchanges), blocked)


def _pairs(model: nn.Module, strategy: Strategy) -> Iterable[tuple[int, Rule, int, int, Layout]]:
    """Number and rule, with number, turn in the schedule and layout of each fragment it serves.

    Last come floating buffers, which share the first fragment's turn, as in `SyncState`.
    """
    specs = tuple(spec_of(name, tensor) for name, tensor in trainable(model).items())
    parts = [(turn, layout_of(specs, names)) for turn, names in strategy.parts(specs)]
    for index, rule in enumerate(strategy.rules):
        for number, (turn, layout) in enumerate(parts):
            if rule.only is None or turn in rule.only:
                yield index, rule, number, turn, message(rule, layout)
    buffers, rule = averaged_buffers(model), strategy.buffer_rule()
    if buffers and rule:
        layout = Layout.of(spec_of(name, buffer) for name, buffer in buffers.items())
        yield len(strategy.rules), rule, len(parts), 0, layout


def _exchanges(
    index: int, rule: Rule, number: int, layout: Layout, *, workers: int, rate: float | None, leaves: Iterable[int]
) -> Exchanges:
    membership = Membership(tuple(range(workers)), 0)
    exchange = rule.mixer.exchange(Situation(membership, 0, Work(1, 1), {}, rule.codec, layout))
    told = 1 if rule.kept else len(exchange.edges.tells) if exchange.edges else None
    nbytes = bytes_sent(exchange.fold, rule.codec, layout, len(exchange.to), 0, told=told)
    return Exchanges(
        rule=index,
        fragment=number,
        names=tuple(spec.name for spec in layout.specs),
        parameters=layout.offsets[-1],
        carry=rule.carry,
        nbytes=nbytes,
        fold=exchange.fold,
        why=_why(rule, exchange.fold, layout, len(exchange.to)),
        leaves=tuple(leaves),
        delay=None if isinstance(rule.landing, OnArrival) else getattr(rule.landing, "steps", 0),
        seconds=nbytes * 8 / rate if rate else None,
    )


def _due(rule: Rule, turn: int, steps: int) -> Iterable[int]:
    step = rule.schedule.next(0, turn, {})
    while step <= steps:
        yield step
        step = rule.schedule.next(step, turn, {})


def _why(rule: Rule, fold: Fold, layout: Layout, members: int) -> str:
    if rule.kept:
        return "handed in to the keeper, whose answer is not counted here"
    if members == 1:
        return "it meets nobody, so nothing is sent"
    mixer = rule.mixer
    while isinstance(mixer, weighted):
        mixer = mixer.mixer
    ways: dict[str, Fold] = {"keeping": Keep(), "reducing": fold if isinstance(fold, Reduce) else Reduce(exact())}
    sent = ", ".join(f"{how} {bytes_sent(each, rule.codec, layout, members, 0):,} bytes" for how, each in ways.items())
    cheaper = isinstance(mixer, all_mean) and mixer.fold is None
    return f"{'the way with fewer bytes' if cheaper else 'as the method says'} ({sent})"


def _waiting(exchanges: Sequence[Exchanges], steps: int, step_time: float) -> float:
    """Seconds that a worker waits in the whole run, if its exchanges take the link in the order they leave in."""
    leaving: dict[int, list[Exchanges]] = defaultdict(list)
    for each in exchanges:
        for step in each.leaves:
            leaving[step].append(each)
    landing: dict[int, list[float]] = defaultdict(list)
    free = waited = 0.0
    last = max((each.delay or 0 for each in exchanges), default=0)
    for step in range(1, steps + last + 1):
        # What is in flight when the run ends is waited for at once.
        trained = min(step, steps) * step_time
        for each in leaving[step]:
            free = max(free, trained + waited) + (each.seconds or 0.0)
            if each.delay is not None:
                landing[step + each.delay].append(free)
        waited = max([waited, *(arrival - trained for arrival in landing[step])])
    return waited
