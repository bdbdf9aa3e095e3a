"""Is the Jensen-Shannon distance between workers a better alarm than the L2 distance of their weights?

    python -m bench.alarm [METHOD...]      writes runs/alarm/METHOD/... and prints a table

Instability is provoked: four times the inner learning rate, 8 workers, outer momentum 0.9. After each round both
distances and the training loss are known. Two questions to each indicator: does it rank rounds by how much the loss
rises in the next three (Spearman's correlation), and how many rounds before a spike does it leave its usual range? The
usual range is the median of the ten rounds before plus three times their median absolute deviation, alike for both. A
spike is a loss more than 5 % above the median of the five rounds before.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.cli.compare import compare, entries, side_by_side_at_most
from atoll.cli.options import Options
from atoll.cli.specs import rows

OUT = Path("runs/alarm")
METHODS = ("global-m1", "local-m1-m2", "noloco:outer_momentum=0.9")
OPTIONS = Options(workers=8, steps=300, lr=1.2e-2)
PERIOD, SEEDS = 10, 2
AHEAD, BEFORE = 3, 5


@dataclass(frozen=True)
class Seen:
    """One run, round by round: the mean training loss of the workers, and both indicators."""

    loss: Sequence[float]
    js: Sequence[float]
    l2: Sequence[float]

    @staticmethod
    def of(metrics: Path) -> "Seen":
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        losses = {each["step"]: statistics.fmean(each["loss"]) for each in records if each["kind"] == "step"}
        apart = [each for each in records if each["kind"] == "disagreement" and each["step"] in losses]
        return Seen(
            [losses[each["step"]] for each in apart],
            [each["js"] for each in apart],
            [each["l2_relative"] for each in apart],
        )


def spikes(loss: Sequence[float]) -> list[int]:
    """Rounds in which a spike begins."""
    high = [at >= BEFORE and loss[at] > 1.05 * statistics.median(loss[at - BEFORE : at]) for at in range(len(loss))]
    return [at for at in range(1, len(loss)) if high[at] and not high[at - 1]]


def alarms(indicator: Sequence[float], past: int = 10) -> list[bool]:
    """Rounds in which an indicator is above its usual range."""
    found = [False] * len(indicator)
    for at in range(past, len(indicator)):
        window = indicator[at - past : at]
        middle = statistics.median(window)
        found[at] = indicator[at] > middle + 3 * statistics.median([abs(value - middle) for value in window])
    return found


def leads(indicator: Sequence[float], loss: Sequence[float]) -> list[int | None]:
    """For each spike, how many rounds before it the indicator was first above its range; None if it was not."""
    loud = alarms(indicator)
    found: list[int | None] = []
    for spike in spikes(loss):
        early = [at for at in range(max(0, spike - BEFORE), spike + 1) if loud[at]]
        found.append(spike - early[0] if early else None)
    return found


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0; equal values share their mean rank."""
    order = sorted(values)
    return [(order.index(value) + len(order) - 1 - order[::-1].index(value)) / 2 for value in values]


def spearman(indicator: Sequence[float], loss: Sequence[float]) -> float:
    """Rank correlation of an indicator with the rise of the loss in the rounds that follow."""
    count = len(loss) - AHEAD
    rises = [max(loss[at + 1 : at + 1 + AHEAD]) / loss[at] for at in range(BEFORE, count)]
    return statistics.correlation(ranks(indicator[BEFORE:count]), ranks(rises))


def main(methods: Sequence[str]) -> None:
    planned = entries(rows(list(methods), OPTIONS, PERIOD), seeds=SEEDS, out=OUT)
    jobs = side_by_side_at_most([entry.run for entry in planned], None)
    compare(planned, OUT, jobs=jobs, resume=True, save_every=OPTIONS.steps)
    print("method                        spikes  JS: corr, leads                L2: corr, leads")
    for method in methods:
        seen = [Seen.of(entry.out / "metrics.jsonl") for entry in planned if entry.label == method]
        cells = [
            f"{statistics.fmean(spearman(getattr(each, name), each.loss) for each in seen):+.2f}  "
            f"{[lead for each in seen for lead in leads(getattr(each, name), each.loss)]}"
            for name in ("js", "l2")
        ]
        count = sum(len(spikes(each.loss)) for each in seen)
        print(f"{method:<30}{count:>6}  {cells[0]:<30}  {cells[1]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or METHODS)
