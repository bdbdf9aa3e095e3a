"""`atoll plan`: what a run would cost, before anything is rented; and the published tables beside ours."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from atoll.cli.options import Planning
from atoll.cli.values import bits_per_second
from atoll.errors import CompositionError, UsageError
from atoll.files import write_whole
from atoll.parts.codecs import cast, error_feedback, float4, quantise
from atoll.parts.mixers import all_mean
from atoll.recipes.methods import METHODS
from atoll.sim import layers, published
from atoll.sim.plan import TARGETS, Planned, Setting, plan, utilisation
from atoll.sim.run import spec
from atoll.sync.rule import Carry, Strategy
from atoll.train.metrics import size
from atoll.train.model import meta_model
from atoll.train.run import Data
from atoll.trees import Spec, spec_of, trainable
from atoll.wire import Codec, Keep, Reduce

HALF = cast(torch.bfloat16)


def setting(asked: Planning) -> Setting:
    """The islands that were asked for.

    Raises: UsageError for a number without its unit, or none where one is needed.
    """
    bandwidth = bits_per_second("--bandwidth", asked.bandwidth) if asked.bandwidth else math.inf
    return Setting(
        parameters(asked), asked.workers, asked.step_time, bandwidth, asked.latency / 1e3, asked.jitter, asked.seed
    )


def parameters(asked: Planning) -> tuple[Spec, ...]:
    """The parameters of a named model, or of one of which only the size is known: blocks alike, and embeddings."""
    if not asked.params:
        model = meta_model(asked.model, vocab=256, length=Data.length)
        return tuple(spec_of(name, tensor) for name, tensor in trainable(model).items())
    each = asked.params / (asked.layers + 1)
    return (spec(each, "embed.weight"), *(spec(each, f"layers.{block}.weight") for block in range(asked.layers)))


def strategy_of(name: str, period: int) -> tuple[Strategy, int]:
    """A method's strategy, and its period: 1 for one that syncs at every step."""
    if name not in METHODS:
        raise UsageError(f"atoll plan does not know the method {name!r}; give some of {', '.join(METHODS)}")
    try:
        return METHODS[name](period=period).strategy, period
    except TypeError:
        return METHODS[name]().strategy, 1


def written(strategy: Strategy, codec: Codec) -> Strategy:
    """The same with all messages written by a codec, and means returned in it where it has no memory."""
    kept = isinstance(codec, error_feedback | float4)

    def rewritten(mixer: Any) -> Any:
        return all_mean(Keep() if kept else Reduce(codec)) if isinstance(mixer, all_mean) else mixer

    rules = tuple(
        replace(rule, codec=codec, mixer=rewritten(rule.mixer))
        if rule.carry in (Carry.DELTA, Carry.ANCHOR, Carry.LIVE)
        else rule
        for rule in strategy.rules
    )
    return replace(strategy, rules=rules)


@dataclass(frozen=True)
class Change:
    """Something to do first, and the utilisation that it leads to."""

    what: str
    utilisation: float


def changes(name: str, period: int, where: Setting) -> list[Change]:
    """What helps a method in a setting, best first: a longer period, fewer bits, overlap, gossip."""
    strategy, own = strategy_of(name, period)
    tried: list[tuple[str, Strategy, int]] = []
    if own > 1:
        tried.append((f"twice the period, {2 * own}", strategy_of(name, 2 * own)[0], 2 * own))
    if any(rule.carry is Carry.DELTA and not rule.kept for rule in strategy.rules):
        wires: dict[str, Codec] = {"bfloat16 on the wire": HALF}
        if all(rule.carry is Carry.DELTA for rule in strategy.rules):
            eight = error_feedback(quantise(8), 1.0)
            wires |= {"8 bits on the wire, with error feedback": eight, "4 bits on the wire": float4()}
        tried += [(what, written(strategy, codec), own) for what, codec in wires.items()]
    others = {"streaming": "overlap", "global-m1": "overlap", "local-m1-m2": "gossip", "noloco": "gossip"}
    for other, how in others.items():
        with suppress(CompositionError):  # a period that is too short for it
            if other != name:
                tried.append((f"{how}: {other}", *strategy_of(other, period)))
    found = [Change(what, utilisation(changed, every, where)[0]) for what, changed, every in tried]
    now = utilisation(strategy, own, where)[0]
    return sorted((change for change in found if change.utilisation > now), key=lambda change: -change.utilisation)


def as_json(planned: Planned, asked: Planning, helps: Sequence[Change]) -> dict[str, Any]:
    """One method as a JSON-able object."""
    return {
        "method": planned.method,
        "bandwidth_bps": bits_per_second("--bandwidth", asked.bandwidth) if asked.bandwidth else None,
        "utilisation": planned.utilisation,
        "period": planned.period,
        "round_s": planned.step_s * planned.period,
        "bytes_per_worker_and_round": planned.nbytes * planned.period,
        "needed_bps": {f"{target:g}": bits for target, bits in planned.needed.items()},
        "changes": [vars(change) for change in helps],
    } | (_budget(planned, asked) if asked.tokens else {})


def _budget(planned: Planned, asked: Planning) -> dict[str, float]:
    assert asked.tokens is not None
    steps = asked.tokens / (asked.workers * asked.tokens_per_step)
    return {
        "steps": steps,
        "wall_s": steps * planned.step_s,
        "bytes_per_worker": steps * planned.nbytes,
    }


def table(each: Sequence[Planned], asked: Planning) -> Table:
    """Methods side by side, for people."""
    shown = Table(
        caption=f"{asked.workers} islands, {asked.bandwidth or 'no limit'} each, {asked.latency:g} ms one way, "
        f"{asked.step_time:g} s per inner step. needed: bandwidth of each island for that utilisation.",
        caption_justify="left",
    )
    columns = ["method", "utilisation", "per round", "bytes per round"]
    columns += [f"needed for {target:.0%}" for target in TARGETS]
    columns += ["wall time", "traffic of an island"] if asked.tokens else []
    for column in columns:
        shown.add_column(column, justify="left" if column == "method" else "right", overflow="fold")
    for planned in each:
        cells = [
            planned.method,
            f"{planned.utilisation:.1%}",
            seconds(planned.step_s * planned.period),
            size(planned.nbytes * planned.period),
        ]
        cells += [rate(planned.needed[target]) for target in TARGETS]
        if asked.tokens:
            budget = _budget(planned, asked)
            cells += [seconds(budget["wall_s"]), size(budget["bytes_per_worker"])]
        shown.add_row(*cells)
    return shown


def rate(bits: float | None) -> str:
    """Bits per second for people.

    Example:
        >>> rate(1.5e8), rate(None)
        ('150 Mbit/s', 'none')
    """
    if bits is None:
        return "none"
    for unit in ("", "k", "M", "G"):
        if bits < 1000:
            return f"{bits:.3g} {unit}bit/s"
        bits /= 1000
    return f"{bits:.3g} Tbit/s"


def seconds(count: float) -> str:
    """A duration for people.

    Example:
        >>> seconds(90), seconds(1e6)
        ('90 s', '11.6 days')
    """
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h"), (math.inf, 86_400, "days")):
        if count < limit:
            return f"{count / length:.3g} {unit}"
    raise AssertionError("unreachable: the last limit is infinite")


def plot(path: Path, names: Sequence[str], period: int, where: Setting) -> None:
    """Utilisation against bandwidth, a line for each method."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    points = [10 ** (6 + place / 8) for place in range(41)]
    for name in names:
        strategy, own = strategy_of(name, period)
        used = [utilisation(strategy, own, replace(where, bandwidth=bits))[0] for bits in points]
        axes.plot([bits / 1e6 for bits in points], used, label=name)
    axes.set_xscale("log")
    axes.set_xlabel("bandwidth of each island, Mbit/s")
    axes.set_ylabel("part of the time that islands train")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    write_whole(path, lambda beside: figure.savefig(beside, dpi=140, format="png"))


def paper(name: str) -> Iterator[dict[str, Any]]:
    """The rows of a published table: ours and theirs."""
    match name:
        case "factored-gossip":
            yield from _gossip()
        case "streaming":
            yield from _cells(published.STREAMING)
        case _:
            yield from _cells(published.SCALING)


def _gossip() -> Iterator[dict[str, Any]]:
    """Seven figures of Factored Gossip, from simulated events with the paper's bfloat16 payload."""
    model = meta_model("factored-gossip-1.5b", vocab=1, length=Data.length)
    specs = tuple(spec_of(name, tensor) for name, tensor in trainable(model).items())
    for figure in published.GOSSIP:
        strategy, period = strategy_of(figure.method, figure.period)
        where = Setting(specs, figure.workers, published.GOSSIP_MODEL.step_s, figure.bandwidth_bps)
        used, _, _ = utilisation(written(strategy, HALF), period, where)
        yield {
            "method": figure.method,
            "bandwidth_bps": figure.bandwidth_bps,
            "utilisation": used,
            "published": figure.utilisation,
        }


def _cells(rows: Sequence[published.Row]) -> Iterator[dict[str, Any]]:
    """Bandwidths that reach a utilisation, from the finer model of layers within a step."""
    for row in rows:
        for target, printed in zip(published.TARGETS, row.gbits, strict=True):
            yield {
                "model_parameters": row.model.parameters,
                "method": repr(row.method),
                "bandwidth_bps": layers.required(row.model, row.method, target),
                "utilisation": target,
                "published": None if printed is None else printed * 1e9,
            }


def planned(names: Sequence[str], asked: Planning) -> list[Planned]:
    """Every method that was asked about."""
    where = setting(asked)
    return [plan(name, *strategy_of(name, asked.period), where) for name in names]
