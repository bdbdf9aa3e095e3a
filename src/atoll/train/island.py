"""Training on one island among others that come and go: step, sync, evaluate, save, and come again when left behind.

The loop of `atoll.train.trainer` has all workers of a run before it begins, and ends with the first that is lost. Here
the group says at each boundary who takes part, and each island keeps a directory of its own: records, checkpoints, and
the shared model at the end.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from atoll.errors import LeftBehind, UsageError
from atoll.files import write_json
from atoll.sync.drive import drive
from atoll.sync.elastic import ElasticGroup
from atoll.sync.shared import Sharing
from atoll.train.checkpoint import Checkpoints
from atoll.train.directory import open_directory
from atoll.train.dynamics import Dynamics
from atoll.train.evaluate import held_out_loss
from atoll.train.inner import autocast
from atoll.train.material import Material
from atoll.train.metrics import LOG_EVERY, Recorder
from atoll.train.model import export_model
from atoll.train.run import Result, Run
from atoll.train.trainer import EVALUATIONS, SAVE_EVERY
from atoll.train.units import Handing, UnitShard
from atoll.train.worker import Worker, make_model
from atoll.trees import Tree
from atoll.wire import Landed


class IslandGroup(ElasticGroup, Protocol):
    """The way to the other islands. `units`: the way to whoever hands out units of data."""

    @property
    def units(self) -> Handing: ...

    def tell(self, *, loss: float, speed: float) -> None:
        """Say how training goes, for whoever watches the run."""
        ...

    def leave(self, why: str) -> None:
        """Ask to take part no more; once the others know, the next boundary raises `LeftBehind`."""
        ...

    def finish(self) -> None:
        """Stay until the others have come to the end too."""
        ...


Connect = Callable[[str, int], AbstractContextManager[IslandGroup]]
"""Connect to the others: what is trained, as all must train it, and the step from which this island could go on."""


def check(run: Run) -> None:
    """Refuse what islands that come and go cannot train.

    Raises: UsageError.
    """
    if run.dynamics != Dynamics() or run.faults.events or run.faults.loss:
        raise UsageError(
            "--pool, --drop, --speeds and --faults are experiments with all workers in one process; leave them out "
            "where islands come and go by themselves"
        )
    if run.method.strategy.kept or not run.method.strategy.rules or not run.method.period:
        raise UsageError(
            f"{run.method.name} cannot be trained by islands that come and go: it has no rounds with anchors that all "
            "could come in by; take one that has, such as diloco, streaming or factored-gossip"
        )


@dataclass
class Island:
    """One worker of a run whose members come and go.

    Args:
        run: what to do; `run.workers` is the number of shards, and so the most islands there can be.
        number: of this worker. connect: the way to the others. out: directory of this island alone; nothing is written
        without one. resume: go on from the last checkpoint in it, or fetch the others' state if they are further.
        save_every: inner steps between checkpoints (default: the period). quiet: show nothing. leaves: whether it
        is to leave before the end.
    Raises: UsageError for what needs all workers in one process.
    """

    run: Run
    number: int
    connect: Connect
    out: Path | None = None
    resume: bool = False
    save_every: int | None = None
    quiet: bool = False
    leaves: Callable[[], bool] = lambda: False
    curve: list[tuple[int, int, float]] = field(default_factory=list[tuple[int, int, float]])
    sent: int = 0
    tokens: int = 0
    spent: float = 0.0

    def __post_init__(self) -> None:
        run = self.run
        check(run)
        if not 0 <= self.number < run.workers:
            raise UsageError(
                f"this island is worker {self.number}, but the data is shared by {run.workers}; give --workers "
                f"{self.number + 1} or more, alike on all"
            )
        torch.set_num_threads(run.threads)
        self._text = Material.of(run)
        self._checkpoints = Checkpoints(self.out) if self.out else None
        self._anchors: Sequence[Tree | None] = ()

    def train(self) -> Result:
        """To the last step, with whoever is there.

        Raises: GroupError if the coordinator refuses this island. What was complete on the disk stays complete.
        """
        run = self.run
        if self.out:
            open_directory(self.out, run, self._text.fingerprint, resume=self.resume, writes=True)
        saved = max(self._checkpoints.steps(), default=0) if self._checkpoints and self.resume else 0
        with self.connect(f"{run!r};{self._text.fingerprint}", saved) as group:
            units = UnitShard(self._text.shards, self.number, run.accumulate, group.units, run.loads)
            worker = Worker(run, make_model(run, self._text.vocab, None), units, self._text.share(self.number), group)
            entered = worker.sync.state.step
            if self._checkpoints and saved:
                self._load(self._checkpoints, saved, worker, whole=not entered)
            if entered or not saved:
                units.begin(entered, group.units.first)
            start = worker.sync.state.step
            path = self.out / "metrics.jsonl" if self.out else None
            label = f"{run.method.name} worker {self.number}"
            with Recorder(path, steps=run.steps, start=start, label=label, visible=not self.quiet) as record:
                if start:
                    how = "took over the others' state" if entered else "resumed from its checkpoint"
                    record.say(f"worker {self.number} {how} at step {start}")
                if self._loop(worker, units, group, record):
                    group.finish()
                else:
                    record.say(f"worker {self.number} has left at step {worker.sync.state.step}")
                return self._result(worker)

    def _loop(self, worker: Worker, units: UnitShard, group: IslandGroup, record: Recorder) -> bool:
        """Whether it came to the end, and was not told to leave before."""
        run, state = self.run, worker.sync.state
        save_every = self.save_every or run.method.period or SAVE_EVERY
        since, seen, unsaved, leaving = time.monotonic(), self.tokens, False, False
        units.tell(state)
        while state.step < run.steps:
            began, step = time.monotonic(), state.step + 1
            try:
                self.tokens += self._step(worker, units, record, step)
                self.spent += time.monotonic() - began
                self._look(worker, group, record, step)
            except LeftBehind as left:
                if leaving:
                    return False
                record.say(f"step {step}  {left}")
                worker.sync.come_again()
                worker.begin_anew()
                units.begin(state.step, group.units.first)
                units.tell(state)
                record.say(f"worker {self.number} took over the others' state at step {state.step}")
                continue
            if step % LOG_EVERY == 0 or step == run.steps:
                now = time.monotonic()
                speed, since, seen = (self.tokens - seen) / (now - since), now, self.tokens
                record.step(step, [worker.loss.item()], speed)
                group.tell(loss=worker.loss.item(), speed=speed)
            unsaved |= step % save_every == 0 or step == run.steps
            if self._checkpoints and unsaved and all(entry.outcome for entry in state.queue):
                record.flush()
                self._save(self._checkpoints, step, worker)
                unsaved = False
            if self.leaves() and not leaving:
                leaving = True
                group.leave("it was told to")
                record.say(f"step {step}  worker {self.number} leaves once the others know, as it was told to")
            if leaving and len(state.membership.workers) == 1:
                return False
        return True

    def _step(self, worker: Worker, units: UnitShard, record: Recorder, step: int) -> int:
        """One inner step, and what is due at its end. Returns the tokens trained."""
        tokens = worker.backward()
        worker.update(step - 1)
        boundary, state = time.monotonic(), worker.sync.state
        if step >= state.due:
            units.tell(state)
        events = worker.sync.after_step(tokens)
        if step == self.run.steps:
            events = [*events, *worker.sync.drain()]
        units.heard(events, state)
        if events or units.turned:
            units.tell(state)
        self.sent += sum(event.sent for event in events if isinstance(event, Landed))
        if events:
            record.events(step, events, time.monotonic() - boundary)
        return tokens

    def _look(self, worker: Worker, group: IslandGroup, record: Recorder, step: int) -> None:
        """Evaluate, where it is time, and this island takes part in rounds already."""
        due = step % max(1, self.run.steps // EVALUATIONS) == 0 or step == self.run.steps
        if due and worker.sync.state.membership.me == self.number:
            loss = self._evaluate(worker, group)
            self.curve.append((step, self.sent, loss))
            record.evaluation(step, loss, self.sent)

    def _evaluate(self, worker: Worker, group: IslandGroup) -> float:
        """Of the shared model: where each island has anchors of its own, all come for their mean, at the same step."""
        state = worker.sync.state
        sharing = Sharing(state, state.step)
        drive(sharing.flow(), group)
        self._anchors = sharing.anchors
        with worker.sync.lent(self._anchors) as model:
            return held_out_loss(model, self._text.held_out, autocast(worker.precision, self.run.device))

    def _save(self, checkpoints: Checkpoints, step: int, worker: Worker) -> None:
        meta, tensors = worker.save()
        meta |= {"tokens": self.tokens, "spent": self.spent, "curve": self.curve, "sent": self.sent}
        checkpoints.write(step, self.number, meta, tensors)
        checkpoints.complete(step, [self.number])

    def _load(self, checkpoints: Checkpoints, step: int, worker: Worker, *, whole: bool) -> None:
        """Take up a checkpoint: all of it, or only this island's own records and place in the data, where the others'
        state was taken over."""
        meta, tensors = checkpoints.read(step, self.number)
        if whole:
            worker.load(meta, tensors)
        else:
            worker.shard.load_state_dict(meta["shard"])
        self.tokens, self.spent, self.sent = meta["tokens"], meta["spent"], meta["sent"]
        self.curve = [(step, sent, loss) for step, sent, loss in meta["curve"]]

    def _result(self, worker: Worker) -> Result:
        state = worker.sync.state
        live = held_out_loss(worker.model, self._text.held_out, autocast(worker.precision, self.run.device))
        result = Result(
            method=self.run.method.name,
            workers=self.run.workers,
            steps=self.run.steps,
            rounds=max((min(track.updates, track.round) for track in state.tracks), default=0),
            period=self.run.method.period,
            tokens=self.tokens,
            val_loss=self.curve[-1][2] if self.curve else live,
            val_loss_workers=(live,),
            bytes_sent_per_worker=self.sent,
            wall_s=self.spent,
            digest=state.digest(self._anchors or None),
            seed=self.run.seed,
            data=self._text.fingerprint,
            curve=tuple(self.curve),
        )
        if self.out:
            with worker.sync.lent(self._anchors or state.anchors()) as model:
                export_model(model, self.out / "model")
            write_json(self.out / "result.json", result.as_json())
        return result
