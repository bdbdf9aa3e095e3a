"""The training loop: step, sync, evaluate, save. The groups it is given decide where the other workers are."""

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import CheckpointError, UsageError
from atoll.files import write_json
from atoll.sync.drive import take_turns
from atoll.sync.gather import Gathering
from atoll.train.checkpoint import Checkpoints
from atoll.train.directory import open_directory
from atoll.train.dynamics import Dynamics
from atoll.train.evaluate import held_out_loss
from atoll.train.inner import autocast
from atoll.train.material import Material
from atoll.train.metrics import LOG_EVERY, Recorder
from atoll.train.model import export_model
from atoll.train.monitor import Monitor
from atoll.train.run import Result, Run, Simulated
from atoll.train.team import Team
from atoll.train.waits import Waits
from atoll.train.worker import Worker, make_model, under
from atoll.wire import PeerGroup

EVALUATIONS = 20
"""Evaluations of the shared model along a run."""
SAVE_EVERY = 50
"""Inner steps between checkpoints of a method without a period."""


def train(
    run: Run,
    groups: Sequence[PeerGroup],
    *,
    out: Path | None = None,
    resume: bool = False,
    save_every: int | None = None,
    build: Callable[[], nn.Module] | None = None,
    quiet: bool = False,
) -> Result:
    """Train the workers whose groups are given: all of a run, in turns, or this process's one.

    Args:
        run: what to do. groups: one per local worker, in order of worker numbers.
        out: run directory; nothing is written without one. resume: go on from the last complete checkpoint in it.
        save_every: inner steps between checkpoints (default: the period).
        build: makes a worker's model, with the same values each time, instead of the run's named size: any module that
        maps [batch, length] tokens to logits.
        quiet: show nothing.
    Raises: UsageError, CheckpointError, GroupError. What was complete on the disk stays complete.
    """
    try:
        trainer = Trainer(run, groups, build=build, out=out, save_every=save_every)
        return trainer.train(trainer.open(resume=resume, quiet=quiet))
    except BaseException:
        for group in groups:
            group.abort()
        raise


class Trainer:
    """The local workers of one run and everything they share. Arguments as in `train`."""

    def __init__(
        self,
        run: Run,
        groups: Sequence[PeerGroup],
        *,
        build: Callable[[], nn.Module] | None,
        out: Path | None,
        save_every: int | None,
    ) -> None:
        torch.set_num_threads(run.threads)
        text = Material.of(run)
        numbers = [group.membership.me for group in groups]
        self.run, self.groups, self.out, self.fingerprint = run, groups, out, text.fingerprint
        self.workers = [
            Worker(run, make_model(run, text.vocab, build), text.shards[m], text.share(m), group)
            for m, group in zip(numbers, groups, strict=True)
        ]
        self.team = Team(run, self.workers, groups)
        self.lead = self.workers[0]
        self.speaks = self.lead.number == 0
        self.held_out = text.held_out
        self.monitor = Monitor(run, self.held_out)
        self.evaluate_every = max(1, run.steps // EVALUATIONS)
        self.save_every = save_every or run.method.period or SAVE_EVERY
        self.checkpoints = Checkpoints(out) if out else None
        self.start, self.tokens, self.spent, self.gatherings = 0, 0, 0.0, 0
        self.curve: list[tuple[int, int, float]] = []
        self.disagreement: list[tuple[int, float, float]] = []
        self._since = 0.0
        self.waits = Waits(run, len(self.workers))
        self._check()
        self.team.start()

    @property
    def sent(self) -> int:
        """Bytes handed to links by a local worker, the most of any."""
        return max(self.team.sent.values())

    def _check(self) -> None:
        """Refuse what would train, but not to a shared model; and peers that train something else."""
        run, state = self.run, self.lead.sync.state
        late = max((track.due for track in state.tracks), default=0)
        if late > run.steps:
            raise UsageError(
                f"{run.method.name} first syncs its last fragment after {late} inner steps, but the run has --steps "
                f"{run.steps}, so that fragment would keep its first weights; give --steps {late} or more, or a "
                "shorter period"
            )
        if state.membership.lanes > 1:
            raise UsageError(
                "this trainer gives each worker one process, but the group has islands of several lanes; use "
                "Synchronizer in a loop of your own"
            )
        if (run.dynamics != Dynamics() or run.faults.loss) and len(self.workers) < run.workers:
            raise UsageError(
                "--pool, --drop and --speeds are experiments with all workers in one process; start them without "
                "torchrun"
            )
        if run.dynamics.speeds and state.gradient_tracks():
            raise UsageError(
                f"{run.method.name} averages gradients within a step, so no worker can be slower than another; leave "
                "--speeds out"
            )
        told = f"{run!r};{self.fingerprint}"
        mine = float(int(sha256(told.encode()).hexdigest()[:12], 16))
        if any(theirs != mine for (theirs,) in self._gather([[mine] for _ in self.workers])):
            raise UsageError(
                f"the workers were started with different options, text or interpreter: worker {self.lead.number} has "
                f"{told}; start all with the same command on the same text"
            )

    def open(self, *, resume: bool, quiet: bool) -> Recorder:
        """Begin or take up the run directory, and give the recorder that goes with it."""
        run, out = self.run, self.out
        if out:
            open_directory(out, run, self.fingerprint, resume=resume, writes=self.speaks)
        if self.checkpoints and resume:
            self._load(self.checkpoints)
        path = out / "metrics.jsonl" if out and self.speaks else None
        label = f"{run.method.name} x{run.workers}"
        return Recorder(path, steps=run.steps, start=self.start, label=label, visible=self.speaks and not quiet)

    def train(self, record: Recorder) -> Result:
        """The loop, from the step resumed from to the last."""
        run = self.run
        with record:
            self._greet(record)
            self._since, spent, seen = time.monotonic(), self.spent, self.tokens
            unsaved = False
            for step in range(self.start + 1, run.steps + 1):
                self._step(step, record)
                if step % LOG_EVERY == 0 or step == run.steps:
                    speed = (self.tokens - seen) / (self._training_seconds() - spent)
                    record.step(step, [worker.loss.item() for worker in self.team.active], speed)
                if step == run.steps:
                    record.events(step, self.team.drain(), 0.0)
                if step % self.evaluate_every == 0 or step == run.steps:
                    with self._off_the_clock():
                        self.evaluate(step, record)
                if joined := self.team.regroup(step):
                    record.say(f"step {step}  {joined} workers from here on")
                unsaved |= step % self.save_every == 0 or step == run.steps
                if self.checkpoints and unsaved and self.team.together:
                    with self._off_the_clock():
                        record.flush()
                        self._save(self.checkpoints, step)
                    unsaved = False
            self.spent = self._training_seconds()
            if self.run.method.strategy.rules and not self.team.rounds:
                record.say("no round has closed, so the shared model still has its first weights; train longer")
            return self.finish()

    def _step(self, step: int, record: Recorder) -> None:
        """One tick: whoever moves takes an inner step, and what is due at its end is carried out."""
        movers = self.team.movers(step)
        self.waits.begin()
        tokens = [worker.backward() for worker in movers]
        record.events(step, self.team.before(movers), 0.0)
        for worker in movers:
            worker.update(step - 1)
        self.waits.carry_out(self.lead.number)
        if self.monitor.due(step, self.team.size):
            with self._off_the_clock():
                distance = self.monitor.measure(self.team.active, self.groups)
                self.disagreement.append((step, distance.js, distance.relative))
                record.disagreement(step, distance)
        boundary = time.monotonic()
        events = self.team.after(movers, tokens)
        self.tokens += sum(tokens) * self.run.workers // len(self.workers)
        if events:
            record.events(step, events, time.monotonic() - boundary)

    def _gather(self, rows: Sequence[list[float]]) -> list[list[float]]:
        """Some numbers of every local worker to everyone; also a meeting point that nobody passes before all have
        come."""
        self.gatherings += 1
        gatherings = [
            Gathering(worker.sync.group.membership, self.gatherings, row)
            for worker, row in zip(self.workers, rows, strict=True)
        ]
        take_turns([gathering.flow() for gathering in gatherings], self.groups)
        return gatherings[0].values

    def evaluate(self, step: int, record: Recorder) -> None:
        """Held-out loss of the shared model; a point of the curve."""
        anchors = self.team.shared()
        if self.speaks:
            with self.lead.sync.lent(anchors) as model:
                loss = held_out_loss(model, self.held_out, autocast(self.lead.precision, self.run.device))
            self.curve.append((step, self.sent, loss))
            record.evaluation(step, loss, self.sent)

    def _save(self, checkpoints: Checkpoints, step: int) -> None:
        """Every worker's part, then, when all have written theirs, the marker. The first has the team's."""
        self.team.settle()
        team, kept = self.team.save()
        shared = {"tokens": self.tokens, "spent": self.spent, "curve": self.curve, "disagreement": self.disagreement}
        for worker in self.workers:
            meta, tensors = worker.save()
            tensors |= {f"keeper.{name}": tensor for name, tensor in kept} if worker is self.lead else {}
            meta |= shared | {"team": team, "sent": self.team.sent[worker.number]}
            checkpoints.write(step, worker.number, meta, tensors)
        if len(self.workers) < self.run.workers:
            self._gather([[0.0] for _ in self.workers])
        if self.speaks:
            checkpoints.complete(step, range(self.run.workers))

    def _load(self, checkpoints: Checkpoints) -> None:
        steps = checkpoints.steps()
        newest = self._gather([[float(max(steps, default=0))] for _ in self.workers])
        if len({step for (step,) in newest}) > 1:
            raise CheckpointError(
                f"the workers see complete checkpoints of different steps in {self.out} "
                f"({[int(step) for (step,) in newest]}); "
                "give all of them the same, shared directory"
            )
        self.start = int(newest[0][0])
        team, kept = dict[str, Any](), dict[str, Tensor]()
        for worker in self.workers if self.start else []:
            meta, tensors = checkpoints.read(self.start, worker.number)
            worker.load(meta, tensors)
            self.team.sent[worker.number] = meta["sent"]
            if worker is self.lead:
                self.tokens, self.spent = meta["tokens"], meta["spent"]
                self.curve = [(step, sent, loss) for step, sent, loss in meta["curve"]]
                self.disagreement = [(step, js, l2) for step, js, l2 in meta["disagreement"]]
                team, kept = meta["team"], under("keeper.", tensors)
        if self.start:
            self.team.load(team, kept)

    def _greet(self, record: Recorder) -> None:
        if self.start:
            record.say(f"resumed from step {self.start}")
        unused = self.run.steps % self.run.method.period if self.run.method.period else 0
        if unused:
            record.say(f"the last {unused} inner steps close no round, so the shared model will not have them")
        if self.run.workers == 1 and self.run.method.strategy.rules:
            record.say("there is one worker: every outer step uses its own delta alone")

    def finish(self, simulated: Simulated | None = None) -> Result:
        """What the run came to, after its last evaluation; writes it, and the shared model, into the run directory."""
        losses = [
            held_out_loss(worker.model, self.held_out, autocast(worker.precision, self.run.device))
            if worker in self.team.active or not simulated
            else math.nan  # on virtual time who died is gone
            for worker in self.workers
        ]
        final = self.curve[-1][2] if self.speaks else 0.0
        sent = [float(self.team.sent[worker.number]) for worker in self.workers]
        rows = self._gather([[loss, final, own] for loss, own in zip(losses, sent, strict=True)])
        state, anchors = self.lead.sync.state, self.team.shared()
        result = Result(
            method=self.run.method.name,
            workers=self.run.workers,
            steps=self.run.steps,
            rounds=self.team.rounds,
            period=self.run.method.period,
            tokens=self.tokens,
            val_loss=final if self.speaks else rows[0][1],
            val_loss_workers=tuple(row[0] for row in rows),
            bytes_sent_per_worker=round(max(row[2] for row in rows)),
            wall_s=self.spent,
            digest=state.digest(anchors),
            seed=self.run.seed,
            data=self.fingerprint,
            curve=tuple(self.curve),
            disagreement=tuple(self.disagreement),
            simulated=simulated,
        )
        if self.out and self.speaks:
            with self.lead.sync.lent(anchors) as model:
                export_model(model, self.out / "model")
            write_json(self.out / "result.json", result.as_json())
        return result

    @contextmanager
    def _off_the_clock(self) -> Generator[None]:
        """Time spent inside is not training time."""
        self.spent += time.monotonic() - self._since
        try:
            yield
        finally:
            self._since = time.monotonic()

    def _training_seconds(self) -> float:
        return self.spent + time.monotonic() - self._since
