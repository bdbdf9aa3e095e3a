"""What `atoll plan` computes: what a run would cost, before anything is rented; what helps; the published tables beside
ours."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from atoll.cli.options import PLANNED, Planning
from atoll.cli.specs import each_once, read
from atoll.cli.values import parameters
from atoll.errors import CompositionError, UsageError
from atoll.parts.codecs import cast, error_feedback, float4, quantise
from atoll.parts.mixers import all_mean
from atoll.recipes.methods import METHODS
from atoll.sim import layers, published
from atoll.sim.plan import Planned, Setting, exchanged, unawaited, used
from atoll.sim.run import spec
from atoll.sync.rule import Carry, Strategy
from atoll.train.model import meta_model
from atoll.train.run import Data
from atoll.trees import Spec, spec_of, trainable
from atoll.units import bits_per_second
from atoll.wire import Codec, Keep, Reduce

HALF = cast(torch.bfloat16)
EXCHANGES, DRAWS = 10_000, 200_000
"""Bounds of what is simulated of one round: exchanges, each island's counted, and each pair's with a keeper; and steps
of all islands, where each is drawn."""
LEAST, MORE = 0.001, 0.25
"""A change that gains less than this part of the time, and of the rounds less than this part more, helps nothing."""
FAR, SHAKY = 0.05, 0.05
"""Seconds one way, and jitter, that the published figures are repeated with."""


@dataclass(frozen=True)
class Row:
    """A method as it was asked for. Args: label: as a person wrote it. given: its arguments, period included."""

    label: str
    name: str
    strategy: Strategy
    period: int
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])


def row(label: str, name: str, given: Mapping[str, Any]) -> Row:
    """The row of a method with these arguments, of which it takes those that it knows."""
    known = parameters(METHODS[name])
    method = METHODS[name](**{key: value for key, value in given.items() if key in known})
    return Row(label, name, method.strategy, method.period or 1, given)


def rows(words: Sequence[str], period: int) -> list[Row]:
    """The rows of METHOD or METHOD:KEY=VALUE,KEY=VALUE.

    Args: period: of every method that has one and is not given its own.
    Raises: UsageError with the nearest name for an unknown method or key, or for a row that is there twice.
    """
    each_once(words)
    found: list[Row] = []
    for word in words:
        name, given, _ = read(word)
        found.append(row(word, name, {"period": period} | given))
        _, longest = PLANNED["period"]
        if found[-1].period > longest:
            raise UsageError(
                f"{word!r} has a period of {found[-1].period}, but a plan is made for {longest:g} inner steps at most; "
                "give a shorter one"
            )
    return found


def setting(asked: Planning) -> Setting:
    """The islands that were asked for.

    Raises: UsageError for a number without its unit, or none where one is needed, or one that nobody plans for.
    """
    specs = specs_of(asked)
    step_s = asked.step_s(sum(each.numel for each in specs))
    bits, latency = bandwidth(asked), asked.latency / 1e3
    return Setting(specs, asked.workers, step_s, bits, latency, asked.jitter, asked.seed, asked.failing)


def bandwidth(asked: Planning) -> float:
    """Of each island's link, in bits per second; infinite if nothing was said."""
    bits = bits_per_second("--bandwidth", asked.bandwidth) if asked.bandwidth else math.inf
    if asked.bandwidth and not 1 <= bits <= 1e15:
        raise UsageError(
            f"--bandwidth was {asked.bandwidth}, but a plan is made for 1bit to 1000Tbit; leave it out for no limit"
        )
    return bits


def specs_of(asked: Planning) -> tuple[Spec, ...]:
    """The parameters of a named model, or of one of which only the size is known: blocks alike, and embeddings."""
    if not asked.params:
        return _named(asked.model, vocab=256)
    each = asked.params / (asked.layers + 1)
    return (spec(each, "embed.weight"), *(spec(each, f"layers.{block}.weight") for block in range(asked.layers)))


def _named(model: str, vocab: int) -> tuple[Spec, ...]:
    return tuple(spec_of(*each) for each in trainable(meta_model(model, vocab=vocab, length=Data.length)).items())


def check(each: Row, where: Setting) -> None:
    """Refuse what would take very long to simulate.

    Raises: UsageError that says what is too much; CompositionError if method and model do not fit.
    """
    exchanges = where.workers * sum(len(each.strategy.divide(where.specs)) for _ in each.strategy.rules)
    exchanges *= where.workers if each.strategy.kept else 1
    if exchanges > EXCHANGES:
        between = " with a keeper, which hears each of them beside all others" if each.strategy.kept else ""
        raise UsageError(
            f"{each.label} makes {exchanges} exchanges in a round of {where.workers} islands{between}, but {EXCHANGES} "
            "are simulated at most; give fewer --workers or fragments"
        )
    if where.jitter and where.workers * each.period > DRAWS:
        raise UsageError(
            f"{each.label} has rounds of {where.workers * each.period} steps on all islands, but jitter is drawn for "
            f"{DRAWS} at most; give a shorter period, fewer --workers, or no --jitter"
        )


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
    """Something to do first.

    Args: utilisation: that it leads to. gain: on what is now, as a part of the time. step_s: seconds from one inner
    step to the next. share: part of the rounds that come about, where nobody waits.
    """

    what: str
    utilisation: float
    gain: float
    step_s: float
    share: float | None = None


def tries(each: Row) -> list[tuple[str, Strategy, int]]:
    """What may help a method: a longer period, fewer bits, overlap, gossip. Each with its strategy and period."""
    found: list[tuple[str, Strategy, int]] = []
    if each.period > 1:
        twice = row(each.label, each.name, {**each.given, "period": 2 * each.period})
        found.append((f"twice the period, {twice.period}", twice.strategy, twice.period))
    carried = {rule.carry for rule in each.strategy.rules}
    wires: dict[str, Codec] = {}
    if carried and Carry.GRADIENT not in carried:
        wires["bfloat16 on the wire"] = HALF
    if carried == {Carry.DELTA} and not each.strategy.kept:
        wires["8 bits on the wire, with error feedback"] = error_feedback(quantise(8), 1.0)
        wires["4 bits on the wire"] = float4()
    for what, codec in wires.items():
        with suppress(CompositionError):  # a part that does not go with it
            found.append((what, written(each.strategy, codec), each.period))
    others = {"diloco": "a period"} if each.period == 1 else {}
    others |= {"streaming": "overlap", "global-m1": "overlap", "local-m1-m2": "gossip", "noloco": "gossip"}
    for name, how in others.items():
        with suppress(CompositionError):  # a period that is too short for it
            if name != each.name and each.strategy.rules:
                other = row(name, name, {"period": each.given["period"]})
                found.append((f"{how}: {name}", other.strategy, other.period))
    return found


def change(tried: tuple[str, Strategy, int], now: Planned, where: Setting) -> Change | None:
    """What a try leads to; None if it helps nothing, or does harm."""
    what, strategy, period = tried
    with suppress(CompositionError):  # fragments that this model has not
        busy, step_s = used(strategy, period, where)
        gain = busy - now.utilisation
        share = exchanged(strategy, period, where).share if unawaited(strategy) else None
        before = now.exchanged.share if now.exchanged else 1.0
        after = 1.0 if share is None else share
        if gain > -1e-9 and after > before - 1e-9 and (gain >= LEAST or after >= (1 + MORE) * before):
            return Change(what, busy, gain, step_s, share)
    return None


def best_first(changes: Sequence[Change | None]) -> list[Change]:
    """Those that help."""
    return sorted((each for each in changes if each), key=lambda each: (-each.gain, -(each.share or 0.0)))


@dataclass(frozen=True)
class Budget:
    """A whole run. Args: steps: inner steps of each worker. wall_s: seconds. nbytes: that a worker sends."""

    steps: float
    wall_s: float
    nbytes: float

    @staticmethod
    def of(planned: Planned, asked: Planning) -> "Budget | None":
        """For the tokens that were asked for, if they were."""
        if asked.tokens is None:
            return None
        steps = asked.tokens / (asked.workers * asked.tokens_per_step)
        return Budget(steps, steps * planned.step_s, steps * planned.nbytes)


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
    specs = _named("factored-gossip-1.5b", vocab=1)
    for figure in published.GOSSIP:
        method = row(figure.method, figure.method, {"period": figure.period})
        strategy = written(method.strategy, HALF)
        near = Setting(specs, figure.workers, published.GOSSIP_MODEL.step_s, figure.bandwidth_bps)
        ours, others = (
            used(strategy, figure.period, where)[0] for where in (near, replace(near, latency=FAR, jitter=SHAKY))
        )
        yield {
            "method": figure.method,
            "bandwidth_bps": figure.bandwidth_bps,
            "utilisation": ours,
            "published": figure.utilisation,
            "utilisation_with_latency_and_jitter": others,
        }


def _cells(each: Sequence[published.Row]) -> Iterator[dict[str, Any]]:
    """Bandwidths that reach a utilisation, from the finer model of layers within a step."""
    for line in each:
        for target, printed in zip(published.TARGETS, line.gbits, strict=True):
            ours = layers.required(line.model, line.method, target)
            yield {
                "model_parameters": line.model.parameters,
                "method": repr(line.method),
                "bandwidth_bps": ours,
                "utilisation": target,
                "published": None if printed is None else printed * 1e9,
                "points_apart": published.points_apart(ours, printed),
            }
