"""Disagreement between the workers at the end of their inner phases, and the alarm that follows it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.parts.gossip import alarmed
from atoll.sync.checks import nested
from atoll.sync.drive import take_turns
from atoll.sync.gather import GatheringBytes
from atoll.train.disagreement import Sketch, all_pairs, from_sketches, generalised, l2_distance, probe, sketch
from atoll.train.metrics import Distance
from atoll.train.run import Run
from atoll.train.worker import Worker
from atoll.trees import trainable
from atoll.wire import PeerGroup

SKETCHES = 1
"""What gatherings of sketches are called, beside those of numbers."""
FEW = 8
"""Workers of which all pairs are compared; more are compared with their mean."""


class Monitor:
    """Compares workers on a fixed text, and keeps the alarms of a strategy alike on all of them.

    An alarm follows sketches in one process too, so that it is the same as in several.

    Args: run; text: batches of [rows, length + 1] tokens, of which `run.probe` tokens are read.
    """

    def __init__(self, run: Run, text: Sequence[Tensor]) -> None:
        self.run = run
        length = text[0].shape[1] - 1
        rows = max(1, run.probe // length)
        self._batch = torch.cat(list(text))[:rows] if run.probe else None
        mixers = (mixer for rule in run.method.strategy.rules for mixer in nested(rule.mixer))
        self._alarm = next((mixer for mixer in mixers if isinstance(mixer, alarmed)), None)
        self.every = run.method.period or max(1, run.steps // 20)
        self.count = 0

    def due(self, step: int, workers: int) -> bool:
        """Whether the `workers` that take part are compared after this inner step: where a round ends, if there are
        two."""
        return self._batch is not None and workers > 1 and step % self.every == 0

    def measure(self, workers: Sequence[Worker], groups: Sequence[PeerGroup]) -> Distance:
        """The distance between all workers now; sets their alarms."""
        assert self._batch is not None
        logs = [probe(worker.model, self._batch) for worker in workers]
        if len(groups) < self.run.workers:
            distance = Distance(self._from_everywhere(logs, workers, groups), float("nan"), float("nan"))
        else:
            distance = Distance(self._between(logs), *l2_distance([_flat(worker) for worker in workers]))
        for worker in workers:
            was = worker.sync.state.signals.get("alarm", 0.0)
            alarm = {"alarm": self._alarm.switch(was, distance.js)} if self._alarm else {}
            worker.sync.state.note({"js": distance.js} | alarm)
        return distance

    def _between(self, logs: Sequence[Tensor]) -> float:
        if self._alarm:
            return from_sketches([sketch(log) for log in logs])
        return all_pairs(logs) if len(logs) <= FEW else generalised(logs)

    def _from_everywhere(self, logs: Sequence[Tensor], workers: Sequence[Worker], groups: Sequence[PeerGroup]) -> float:
        """The same from sketches that the processes send one another: a lower bound."""
        self.count += 1
        sketches = [sketch(log) for log in logs]
        gatherings = [
            GatheringBytes(worker.sync.state.membership, SKETCHES, self.count, each.packed)
            for worker, each in zip(workers, sketches, strict=True)
        ]
        take_turns([each.flow() for each in gatherings], groups)
        return from_sketches([Sketch(row, sketches[0].top) for row in gatherings[0].rows])


def _flat(worker: Worker) -> list[Tensor]:
    return [tensor.detach().flatten() for tensor in trainable(worker.model).values()]
