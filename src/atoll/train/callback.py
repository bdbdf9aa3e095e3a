"""A callback that adds a strategy to the Trainer of transformers; loop, data and inner optimizer stay the Trainer's.

What happens when, in the Trainer's own order:

    on_train_begin           all workers compare step, length, strategy and weights; a resumed run takes up its state
    on_step_begin            live weights are in the model
        forward, backward    of all micro-batches
    on_pre_optimizer_step    gradients are averaged, and only then clipped, where the strategy carries them
        optimizer.step()
    on_step_end              one inner step is counted; exchanges leave and land
        evaluate, save       see the shared model, lent for as long as they take
    on_save                  live weights are back, and the checkpoint gets a file with the rest of the worker's state
    on_train_end             what is in flight is used, and the model keeps the shared weights

Each worker is a plain process with a Trainer of its own, because a Trainer that finds itself in a distributed launch
averages gradients at every step. `examples/hf_trainer.py` shows how to start them.
"""

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.training_args import ParallelMode, TrainingArguments

from atoll.errors import CheckpointError, UsageError
from atoll.files import write_whole
from atoll.parts.mixers import by_tokens, weighted
from atoll.sync.drive import drive
from atoll.sync.flow import settle
from atoll.sync.gather import Gathering
from atoll.sync.rule import Carry, Strategy
from atoll.sync.synchronizer import Synchronizer
from atoll.train.run import Method
from atoll.wire import Event, Landed, Lost, PeerGroup

FORMAT = 1

logger = logging.getLogger(__name__)


class SyncCallback(TrainerCallback):
    """Carries out a strategy for one worker whose loop is a `transformers.Trainer`.

    Evaluations and checkpoints during training see the shared model, and so does everything after it; each worker
    needs its own `output_dir`. Where each worker has an anchor of its own (gossip, eager), the shared model is their
    mean, so all workers must evaluate and save at the same steps. `resume_from_checkpoint` continues bit for bit. Give
    it last in `callbacks`, so that it sees what the others ask for. The logged gradient norm is the worker's own, even
    where gradients are averaged.

    Args: method: a method, of which the strategy is used (inner optimizer and learning rate are the Trainer's), or a
        strategy. group: the way to the other workers; it serves this one run. share: this worker's part of all the
        data, 1 on average (for `weighted(by_share(), ...)`).
    Raises: UsageError, CheckpointError, GroupError, all from `train()`; `UsageError` at once without accelerate.

    Example:
        >>> from atoll.peers.memory import Hub
        >>> from atoll.recipes.methods import diloco
        >>> callback = SyncCallback(diloco(period=50), Hub(1).group(0))  # Trainer(..., callbacks=[callback])
    """

    def __init__(self, method: Method | Strategy, group: PeerGroup, *, share: float = 1.0) -> None:
        if find_spec("accelerate") is None:
            raise UsageError(
                "SyncCallback serves the Trainer of transformers, which needs accelerate, and that is not installed; "
                "write pip install 'atoll[hf]'"
            )
        self.strategy = method.strategy if isinstance(method, Method) else method
        self.group = group
        self.share = share
        self._sync: Synchronizer | None = None
        self._loan: ExitStack | None = None
        self._averages = any(rule.carry is Carry.GRADIENT for rule in self.strategy.rules)
        self._meets = not self.strategy.agrees and len(group.membership.workers) > 1
        self._tokens = 0

    @property
    def sync(self) -> Synchronizer:
        """The worker's synchronizer, from the start of training on: its state, its digest, its shared weights.

        Raises: UsageError before that.
        """
        if self._sync is None:
            raise UsageError("SyncCallback has nothing to show before trainer.train() has begun; ask afterwards")
        return self._sync

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Meet the other workers, and take up where a checkpoint stopped."""
        model: nn.Module = kwargs["model"]
        self._refuse_what_cannot_work(args)
        saved = _read(self._file(args, state), self._run()) if state.global_step else None
        self._compare(args, state)
        sync = self._sync = Synchronizer(model, self.strategy, self.group, share=self.share)
        self._tokens = state.num_input_tokens_seen
        if saved:
            self._take_up(self._file(args, state), *saved)
        elif (late := max(track.due for track in sync.state.tracks)) > state.max_steps:
            raise UsageError(
                f"the last fragment would first be synced after {late} optimizer steps, but the Trainer takes "
                f"{state.max_steps}, so it would keep its first weights; write a shorter period, or train longer"
            )
        if args.eval_on_start:
            self._lend()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Train live weights, and keep the Trainer from clipping gradients that are yet to be averaged."""
        self._give_back()
        if self._averages:
            # the Trainer clips only to a norm above zero; whoever interrupts this step leaves a value that can be read
            args.max_grad_norm = -abs(args.max_grad_norm)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Average the gradients and do the clipping the Trainer was asked for."""
        if self._averages:
            _tell(self.sync.before_step(), state.global_step + 1)
            args.max_grad_norm = abs(args.max_grad_norm)
            if args.max_grad_norm:
                nn.utils.clip_grad_norm_(kwargs["model"].parameters(), args.max_grad_norm)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step, and start or use whatever is due."""
        tokens, self._tokens = state.num_input_tokens_seen - self._tokens, state.num_input_tokens_seen
        _tell(self.sync.after_step(tokens), state.global_step)
        if control.should_evaluate or control.should_save:
            self._lend()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The Trainer may evaluate and save here, too."""
        if control.should_evaluate or control.should_save:
            self._lend()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put what the Trainer does not know of into its checkpoint."""
        lent, path = self._loan is not None, self._file(args, state)
        if not any(each != path for each in path.parent.glob("*.safetensors")):
            # save_pretrained writes on rank 0 of the default process group only, of which each worker may be a rank
            save_model(kwargs["model"], str(path.parent / "model.safetensors"), metadata={"format": "pt"})
        self._give_back()
        if not lent:
            logger.warning(
                "the checkpoint of step %d was asked for by a callback that comes after SyncCallback, so it holds live "
                "weights of one worker and cannot be resumed; put SyncCallback last",
                state.global_step,
            )
        elif not args.save_only_model:
            drive(settle(self.sync.state), self.group)
            _write(path, {"run": self._run(), "sync": self.sync.state.meta()}, self._tensors())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Use what is in flight; the model then holds the shared weights, or the best of them where asked for."""
        fragments = self.sync.state.fragments
        chosen = args.load_best_model_at_end and state.best_model_checkpoint is not None
        best = [fragment.live.copied() for fragment in fragments] if chosen else []
        self._give_back()
        _tell(self.sync.drain(), state.global_step)
        # by all, also by one that has chosen: it may be a mean over all workers
        with self.sync.shared_weights():
            shared = [fragment.live.copied() for fragment in fragments]
        for fragment, values in zip(fragments, best or shared, strict=True):
            fragment.live.adopt(values)

    def _refuse_what_cannot_work(self, args: TrainingArguments) -> None:
        mixers = [rule.mixer for rule in self.strategy.rules]
        tokens = any(isinstance(mixer, weighted) and isinstance(mixer.by, by_tokens) for mixer in mixers)
        for wrong, sentence in (
            (
                args.parallel_mode is ParallelMode.DISTRIBUTED or self.group.membership.lanes > 1,
                "the Trainer was started in a distributed launch, so it would average gradients over its processes at "
                "every step by itself; start each worker as a plain process, without torchrun or accelerate launch, as "
                "examples/hf_trainer.py does",
            ),
            (
                self._sync is not None,
                "train() was started again with a SyncCallback that has served a run (auto_find_batch_size does so, "
                "too), but its group is where that run stopped; make a new group and a new callback",
            ),
            (
                not self.strategy.rules,
                "the strategy has no rules, so nothing would be synced; leave SyncCallback out, or give a method such "
                "as diloco(period=50)",
            ),
            (
                self.strategy.kept,
                "the strategy has a keeper, which needs all workers in one process here, but each Trainer is a process "
                "of its own; give a method without a keeper, or run it by `atoll train`",
            ),
            (
                self._meets and "epoch" in (args.eval_strategy, args.save_strategy),
                "all workers must come together for the shared model of this strategy, but an epoch ends at another "
                "step on a worker that has other data; write eval_strategy='steps', save_strategy='steps'",
            ),
            (
                self._averages and args.fp16,
                "gradients were to be averaged with fp16=True, but a worker whose loss scale overflows skips a step "
                "that the others take; write bf16=True",
            ),
            (
                tokens and args.include_num_input_tokens_seen == "no",
                "contributions are weighed by tokens, but the Trainer was not asked to count them; write "
                "TrainingArguments(include_num_input_tokens_seen='all')",
            ),
            (
                args.save_total_limit == 1 and args.save_strategy != "no" and not args.save_only_model,
                "save_total_limit is 1, but the Trainer deletes the checkpoint before while the new one still lacks "
                "SyncCallback's file, so a kill could leave none to resume from; write save_total_limit=2 or more",
            ),
        ):
            if wrong:
                raise UsageError(sentence)

    def _compare(self, args: TrainingArguments, state: TrainerState) -> None:
        """Meet all workers once before the first step: where do they start, how far do they go, whose is the folder?"""
        members = self.group.membership
        if args.save_strategy != "no":
            (Path(str(args.output_dir)) / f"atoll-worker-{members.me}").touch()
        gathering = Gathering(members, 0, [state.global_step, state.max_steps, *self._visits(args, state)])
        drive(gathering.flow(), self.group)
        rows = dict(zip(members.workers, gathering.values, strict=True))
        mine = rows[members.me]
        for worker, theirs in rows.items():
            if theirs[:2] != mine[:2]:
                raise UsageError(
                    f"worker {members.me} trains from optimizer step {mine[0]:.0f} to {mine[1]:.0f} but worker "
                    f"{worker} from {theirs[0]:.0f} to {theirs[1]:.0f}; give all of them the same max_steps, and "
                    "resume all from checkpoints of the same step"
                )
            if theirs != mine:
                raise UsageError(
                    f"worker {members.me} {_planned(*mine[2:])} but worker {worker} {_planned(*theirs[2:])}; all must "
                    "come together for the shared model of this strategy, so give all of them the same arguments for "
                    "evaluations and checkpoints"
                )
        others = sorted({path.name for path in Path(str(args.output_dir)).glob("atoll-worker-*")})
        if args.save_strategy != "no" and others != [f"atoll-worker-{members.me}"]:
            raise UsageError(
                f"worker {members.me} was to save into {args.output_dir}, which is also the folder of "
                f"{' and '.join(name.removeprefix('atoll-') for name in others)}; give each worker an output_dir of "
                "its own"
            )

    def _visits(self, args: TrainingArguments, state: TrainerState) -> list[float]:
        """When the shared model is asked for, where all must ask together: every so many steps for an evaluation, from
        which on, whether at the start; every so many for a checkpoint. 0 is never."""
        if not self._meets:
            return [0.0] * 4
        evaluates, saves = args.eval_strategy == IntervalStrategy.STEPS, args.save_strategy == SaveStrategy.STEPS
        evaluations = [state.eval_steps, args.eval_delay] if evaluates else [0, 0]
        return [*evaluations, args.eval_on_start, state.save_steps if saves else 0]

    def _run(self) -> str:
        """What a checkpoint must have in common with the run that resumes it."""
        return f"{self.strategy!r} over workers {self.group.membership.workers}"

    def _file(self, args: TrainingArguments, state: TrainerState) -> Path:
        """This worker's file in the checkpoint of this step: where the Trainer writes it."""
        name = f"atoll-worker-{self.group.membership.me}.safetensors"
        return Path(str(args.output_dir), f"checkpoint-{state.global_step}", name)

    def _live(self) -> dict[str, Tensor]:
        """Live tensors that differ from the shared model's, by name."""
        return {
            f"live.{spec.name}": tensor.detach()
            for fragment in self.sync.state.fragments
            if fragment.anchor
            for spec, tensor in zip(fragment.layout.specs, fragment.tensors, strict=True)
        }

    def _tensors(self) -> dict[str, Tensor]:
        return {f"sync.{name}": tensor for name, tensor in self.sync.state.tensors()} | self._live()

    def _take_up(self, path: Path, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        saved = {name.removeprefix("sync."): tensor for name, tensor in tensors.items() if name.startswith("sync.")}
        self.sync.state.load(meta["sync"], saved)
        loaded = {name: tensor.clone() for name, tensor in self._live().items()}
        with self.sync.shared_weights():
            different = [name for name, tensor in self._live().items() if not torch.equal(tensor, loaded[name])]
        if different:
            raise CheckpointError(
                f"{path} is not of the checkpoint that the Trainer loaded: {different[0].removeprefix('live.')} "
                "differs; resume from a checkpoint in output_dir itself"
            )
        for name, tensor in self._live().items():
            tensor.copy_(tensors[name])

    def _lend(self) -> None:
        if self._loan is None:
            self._loan = ExitStack()
            self._loan.enter_context(self.sync.shared_weights())

    def _give_back(self) -> None:
        if self._loan is not None:
            self._loan.close()
            self._loan = None


def _planned(every: float, since: float, start: float, saves: float) -> str:
    first = " and at the start" if start else ""
    return f"evaluates every {every:.0f} steps from {since:.0f} on{first} and saves every {saves:.0f} (0: never)"


def _tell(events: list[Event], step: int) -> None:
    for event in events:
        where = f"step {step}: round {event.key.round} of fragment {event.key.fragment}"
        if isinstance(event, Landed):
            logger.info("%s landed, the mean of %d workers; %d bytes sent", where, len(event.peers), event.sent)
        elif isinstance(event, Lost):
            logger.warning("%s did not count: %s", where, event.why)


def _write(path: Path, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    header = {"atoll": json.dumps({"format": FORMAT, **meta})}
    try:
        write_whole(path, lambda beside: save_file(dict(tensors), beside, metadata=header))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} could not be written ({error}); make room, and resume from the checkpoint before it"
        ) from error


def _read(path: Path, run: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.exists():
        raise CheckpointError(
            f"the Trainer resumed from a checkpoint, but {path} does not exist; resume all workers from a step whose "
            "checkpoints in output_dir are complete, or, if the checkpoint was made without SyncCallback, start a new "
            "run from its weights"
        )
    try:
        with safe_open(path, framework="pt") as file:  # pyright: ignore[reportUnknownVariableType]
            meta = json.loads(file.metadata()["atoll"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from the checkpoint before it") from error
    if meta["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {meta['format']}, this version of atoll reads format {FORMAT}; resume with the version "
            "that wrote it"
        )
    if meta["run"] != run:
        raise CheckpointError(
            f"{path} is of {meta['run']}, but this run is {run}; resume with the method it was made with"
        )
    return meta, tensors
