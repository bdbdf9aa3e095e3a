"""What a person reads on stdout."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.files import finite
from atoll.sim.trace import Trace
from atoll.sync.explain import Exchanges, Explanation
from atoll.train.metrics import duration, size
from atoll.train.run import Result
from atoll.wire import Keep, Reduce, Sum


def json_line(value: Any) -> str:
    """One line of JSON; nan and inf become null."""
    return json.dumps(finite(value), allow_nan=False)


def summary(result: Result, out: Path | None) -> str:
    """A finished run in a few lines."""
    workers = " ".join(f"{loss:.4f}" for loss in result.val_loss_workers)
    rounds = f"{result.rounds} rounds" if result.rounds else "no communication"
    lines = [
        f"{result.method}: {result.workers} workers, {result.steps} steps, {rounds}, {result.tokens:,} tokens, "
        f"{result.wall_s:.1f} s",
        f"held-out loss {result.val_loss:.4f} nats per token of the shared model, {workers} of the workers' own",
        f"{size(result.bytes_sent_per_worker)} sent per worker; digest {result.digest}",
    ]
    if result.simulated:
        lines.append(
            f"{duration(result.simulated.seconds)} of simulated time, of which the islands trained "
            f"{result.simulated.utilisation:.1%}"
        )
    if out:
        lines.append(f"{out / 'model'} loads with transformers; {out / 'curves.png'} shows the curve")
    return "\n".join(lines)


def troubles(trace: Trace, changes: Sequence[float]) -> str:
    """What went wrong on the islands of a simulated run: a line for each, or none.

    Args: changes: when faults begin and end.
    """
    found: dict[int, list[str]] = {}
    for moment in trace.ordered():
        if moment.kind in ("died", "froze", "woke", "joined") and moment.time <= trace.seconds:
            found.setdefault(moment.island, []).append(f"{moment.kind} at {moment.time:.1f} s")
    for island, lost in enumerate(trace.lost):
        if lost:
            found.setdefault(island, []).append(f"lost {lost} exchange{'s' * (lost > 1)}")
    lines = [f"island {island} {', '.join(said)}" for island, said in sorted(found.items())]
    if after := sum(time > trace.seconds for time in changes):
        of = f"{after} of {len(changes)} changes in the faults file"
        lines.append(f"{of} come after the end of the run, at {trace.seconds:.1f} s")
    return "\n".join(lines)


def in_words(explained: Explanation, bandwidth: str | None) -> str:
    """A paragraph for each fragment and rule, and one for all together."""
    return "\n\n".join([_paragraph(each, bandwidth) for each in explained.exchanges] + [_totals(explained)])


def _paragraph(each: Exchanges, bandwidth: str | None) -> str:
    lands = "when it comes: nobody waits"
    if each.delay is not None:
        lands = f"{each.delay} inner step{'s' * (each.delay > 1)} later" if each.delay else "at once: training waits"
    tensors = f"{len(each.names)} tensor{'s' * (len(each.names) > 1)}"
    lines = [
        f"fragment {each.fragment}: {each.parameters:,} parameters in {tensors} ({each.names[0]} ...)",
        f"  sends     {size(each.nbytes)} of {each.carry.value} per exchange and worker",
        f"  combined  {_fold(each)}, {each.why}",
        f"  leaves    after inner step {_steps(each.leaves)}",
        f"  lands     {lands}",
    ]
    if each.seconds is not None:
        lines.append(f"  takes     {each.seconds:.3g} s at {bandwidth}")
    return "\n".join(lines)


def _steps(steps: Sequence[int]) -> str:
    if len(steps) <= 4:
        return ", ".join(map(str, steps)) or "none of this run"
    return f"{steps[0]}, {steps[1]}, {steps[2]}, ... {steps[-1]} ({len(steps)} times)"


def _fold(each: Exchanges) -> str:
    match each.fold:
        case Keep():
            return "every wire kept as it was sent"
        case Reduce():
            return "each worker reduces its part and returns it"
        case Sum():
            return "the backend's own sum"


def _totals(explained: Explanation) -> str:
    count = sum(len(each.leaves) for each in explained.exchanges)
    if not count:
        return f"In {explained.steps} steps nothing is sent."
    lines = [
        f"In {explained.steps} steps each worker takes part in {count} exchanges",
        f"and sends {size(explained.nbytes)} ({explained.nbytes:,} bytes).",
    ]
    if explained.blocked is not None:
        lines.append(f"It waits for the link {explained.blocked:.1%} of the time")
        lines.append("(latency, encoding and outer steps are not counted).")
    return "\n".join([" ".join(lines[:2]), " ".join(lines[2:])]).rstrip()
