"""Is DiLoCo's utilisation what `atoll plan` says?

Four processes over gloo, each on an emulated wide-area link of its own (`bench.link`), against the simulator in the
same setting. Inner steps are timed waits, so that the machine's cores have nothing to do but the exchange.

The simulator knows neither what TCP makes of a link nor what an exchange costs that moves no bytes. Two numbers are
taken from one bandwidth and payload, and hold for all others:

    fixed       seconds of an exchange whose model has hardly an element, less what the simulator says of it: round
                trips that it does not count, and the library's own work. Planned as so much more latency, so what is
                overlapped hides them as well
    efficiency  of the link: planned over measured seconds in which a round's bytes move. Planned as so much less
                bandwidth

`bench.used` takes a third one from a second bandwidth: seconds of an exchange that grow with its elements and not with
the link, planned as latency too.

A round's utilisation is the time waited in inner steps over the time from one boundary's end to the next one's, both
in the mean over workers. The difference in the seconds at boundaries is the harder measure: inner steps, which nobody
plans wrongly, do not soften it.

Two numbers are enough while a chunk takes far longer on the link than a message does to cross it (here 80 to 310 ms
against 10 ms). Over gloo a message waits until its receiver has said that it is ready, so a boundary of one chunk has
six latencies, and each further chunk about 1.6 more; the simulator counts two in all.
"""

import math
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import mean, median

import torch
from torch import nn

from atoll.peers.torchdist import TorchGroup
from atoll.recipes.methods import diloco
from atoll.sim.plan import Setting, utilisation
from atoll.sim.run import spec
from atoll.sync.synchronizer import Synchronizer
from atoll.testing.processes import gloo, launch
from atoll.train.run import Method
from atoll.trees import Spec
from bench import link
from bench.measure import Figure

WORKERS = 4
TENSORS = ("0", "1", "head")
"""Of the model, all alike: two blocks and what is outside of them."""
GOAL = 0.05
LEAST, MOST, HALVINGS = 1 / 64, 64.0, 20
"""Between which an efficiency is looked for, and how often its range is halved: to 1e-5 of it."""
SILENT = timedelta(seconds=60)
"""How long workers outlive a bench that was killed."""
UTILISATION = "of the time in inner steps"


@dataclass(frozen=True)
class Case:
    """A setting, and how long it is run.

    Args: method: with a period. bandwidth: bits per second. latency: seconds, one way. elements: of each tensor, fp32.
    step_s: seconds of an inner step. rounds: measured, after `warm` that are not.
    """

    method: Method
    bandwidth: float
    latency: float
    elements: int
    step_s: float
    rounds: int
    warm: int = 1

    @property
    def period(self) -> int:
        """Inner steps of a round."""
        assert self.method.period is not None
        return self.method.period

    @property
    def trained(self) -> float:
        """Seconds of a round in inner steps."""
        return self.period * self.step_s

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Of the model."""
        return tuple(spec(self.elements, name) for name in TENSORS)

    def __str__(self) -> str:
        megabytes = 4 * len(TENSORS) * self.elements / 1e6
        return f"{self.method.name}, {self.bandwidth / 1e6:.3g} Mbit/s, {megabytes:.1f} MB"


@dataclass(frozen=True)
class Round:
    """Seconds waited in inner steps, and at boundaries: means over workers."""

    waited: float
    boundary: float

    @property
    def utilisation(self) -> float:
        return self.waited / (self.waited + self.boundary)


@dataclass(frozen=True)
class Calibration:
    """What a plan does not know. Args: fixed: seconds of each exchange. each: more of them, for each element of a
    tensor. efficiency: of links."""

    fixed: float = 0.0
    each: float = 0.0
    efficiency: float = 1.0

    def boundary(self, case: Case) -> float:
        """Planned seconds at the boundaries of a round."""
        # an exchange has two latencies in the plan
        latency = case.latency + (self.fixed + self.each * case.elements) / 2
        bandwidth = self.efficiency * case.bandwidth
        setting = Setting(case.specs, WORKERS, case.step_s, bandwidth, latency)
        return case.period * utilisation(case.method.strategy, case.period, setting)[1] - case.trained

    def utilisation(self, case: Case) -> float:
        """Planned."""
        return case.trained / (case.trained + self.boundary(case))


def calibrated(bare: Case, base: Case, slow: Case | None, seconds: Mapping[Case, float]) -> Calibration:
    """From the measured seconds of a boundary that moves no bytes to speak of, of one that does, and of one over a
    slower link: without it, all that bytes take is held to be the link's."""
    known = Calibration(seconds[bare] - Calibration().boundary(bare))
    if slow:
        longer = known.boundary(slow) - known.boundary(base)
        both = replace(known, efficiency=longer / (seconds[slow] - seconds[base]))
        # how often a round waits for what an exchange takes more
        often = replace(both, fixed=both.fixed + 1).boundary(base) - both.boundary(base)
        each = (seconds[base] - both.boundary(base)) / often / base.elements
        if each > 0:
            return replace(both, each=each)
    # nothing takes less than no time: what there is to see of an efficiency is in both alike
    return replace(known, efficiency=_efficiency(known, (base, slow) if slow else (base,), seconds))


def _efficiency(known: Calibration, cases: Sequence[Case], seconds: Mapping[Case, float]) -> float:
    """With which planned seconds are measured ones, in the mean over cases."""
    low, high = LEAST, MOST
    for _ in range(HALVINGS):
        tried = replace(known, efficiency=math.sqrt(low * high))
        if mean(tried.boundary(case) / seconds[case] for case in cases) > 1:
            low = tried.efficiency
        else:
            high = tried.efficiency
    return low


Work = Callable[[int, str, str, Case], list[tuple[float, float]]]
"""One worker, by its number, the network's door, and a folder that all share: seconds waited, and at boundaries, of
each round that is measured."""


def figures(
    bandwidth: float = 40e6, elements: int = 350_000, step_s: float = 0.3, rounds: int = 3, turns: int = 2
) -> Iterator[Figure]:
    """Planned and measured at half and twice the bandwidth, and at half the payload: two minutes and a half."""
    if why := link.missing():
        print(f"planned    skipped: {why}")
        return
    base = Case(diloco(5), bandwidth, latency=0.01, elements=elements, step_s=step_s, rounds=rounds)
    others = [
        replace(base, bandwidth=bandwidth / 2),
        replace(base, bandwidth=bandwidth * 2),
        replace(base, elements=elements // 2),
    ]
    yield from compared(base, None, others, work, turns)


def compared(base: Case, slow: Case | None, others: Sequence[Case], work: Work, turns: int) -> Iterator[Figure]:
    """The calibration at a case or two, and what is planned by it and measured at others, which are run in turns."""
    bare = replace(base, elements=1, step_s=base.step_s / 10)
    found: defaultdict[Case, list[Round]] = defaultdict(list)
    for _ in range(turns):
        for case in (bare, base, *([slow] if slow else []), *others):
            found[case] += measured(case, work)
    boundary = {case: median(each.boundary for each in rounds) for case, rounds in found.items()}
    used = {case: [each.utilisation for each in rounds] for case, rounds in found.items()}
    known = calibrated(bare, base, slow, boundary)
    yield Figure(f"{base}: uncalibrated", [Calibration().utilisation(base)], UTILISATION)
    yield Figure(f"{base}: measured", used[base], UTILISATION)
    yield Figure(f"{base}: fixed", [known.fixed], "s of each exchange")
    yield Figure(f"{base}: more for its elements", [known.each * base.elements], "s of each exchange")
    yield Figure(f"{base}: efficiency", [known.efficiency], "of the bandwidth")
    for case in others:
        planned = known.utilisation(case)
        yield Figure(f"{case}: uncalibrated", [Calibration().utilisation(case)], UTILISATION)
        yield Figure(f"{case}: planned", [planned], UTILISATION)
        yield Figure(f"{case}: measured", used[case], UTILISATION)
        yield Figure(f"{case}: apart", [abs(planned / median(used[case]) - 1)], "of measured", most=GOAL)
        yield Figure(f"{case}: boundary", [abs(known.boundary(case) / boundary[case] - 1)], "of measured seconds apart")


def measured(case: Case, work: Work) -> list[Round]:
    """The rounds of a run over the emulated network."""
    access = link.Access(case.bandwidth, case.latency)
    with tempfile.TemporaryDirectory() as folder, link.network(WORKERS, access) as door:
        each = launch(work, WORKERS, door, folder, case, timeout=300.0)
    return [Round(*map(mean, zip(*alike, strict=True))) for alike in zip(*each, strict=True)]


def work(worker: int, door: str, folder: str, case: Case) -> list[tuple[float, float]]:
    """One worker over gloo."""
    link.join(door, worker)
    os.environ["GLOO_SOCKET_IFNAME"] = link.DEVICE
    with gloo(worker, WORKERS, Path(folder) / "meeting", timeout=SILENT.total_seconds()):
        group = TorchGroup(timeout=SILENT)
        with Synchronizer(model(case), case.method.strategy, group) as sync:
            found = trained(case, sync)
        group.close()
    return found


def model(case: Case) -> nn.Module:
    """Parameters, and nothing that they are for."""
    return nn.ParameterDict({spec.name: torch.zeros(spec.shape) for spec in case.specs})


def trained(case: Case, sync: Synchronizer) -> list[tuple[float, float]]:
    """Seconds waited in inner steps, and at boundaries, of each round but the warm ones."""
    found: list[tuple[float, float]] = []
    for _ in range(case.warm + case.rounds):
        waited = boundary = 0.0
        for _ in range(case.period):
            began = time.perf_counter()
            time.sleep(case.step_s)
            stepped = time.perf_counter()
            sync.after_step(tokens=1)
            waited, boundary = waited + stepped - began, boundary + time.perf_counter() - stepped
        found.append((waited, boundary))
    return found[case.warm :]
