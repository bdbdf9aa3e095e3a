"""Which blocks of a model make its workers disagree: replace one by its mean over workers, and see what that changes.

For mixers that mix a part of the parameters, as Factored Gossip DiLoCo does (section 5.1: embedding, head and the first
two blocks, 43 % of them). The procedure is ours, and what it selects depends on the model and on how long it trained.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll.errors import CheckpointError, DataError, ModelError, UsageError
from atoll.train.checkpoint import Checkpoints
from atoll.train.corpus import load_corpus
from atoll.train.disagreement import all_pairs, probe
from atoll.train.run import Data, Method, Run
from atoll.train.shards import held_out_batches
from atoll.train.tokens import bytes_tokenizer, hub_tokenizer
from atoll.train.worker import make_model
from atoll.trees import trainable


@dataclass(frozen=True)
class Block:
    """Parameters that are replaced together: those of a numbered block, or of a module outside of all such.

    Args: name: of the module. names: of the parameters. patterns: shell-style, matching exactly these. numel, nbytes:
    elements and bytes.
    """

    name: str
    names: tuple[str, ...]
    patterns: tuple[str, ...]
    numel: int
    nbytes: int


@dataclass(frozen=True)
class Drop:
    """By how much the Jensen-Shannon distance between workers falls when `block` alone is mixed."""

    block: Block
    drop: float

    @property
    def per_megabyte(self) -> float:
        """Of the block's 10^6 bytes."""
        return self.drop * 1e6 / self.block.nbytes


@dataclass(frozen=True)
class Sensitivity:
    """What was measured.

    Args:
        step: of the checkpoint. workers: compared. tokens: of the probe. distance: between them as they are.
        drops: of all blocks, steepest per byte first.
        chosen: blocks in the order in which they were taken. left: the distance after each. part: of the parameters
        that they are.
    """

    step: int
    workers: int
    tokens: int
    distance: float
    drops: tuple[Drop, ...]
    chosen: tuple[Block, ...]
    left: tuple[float, ...]
    part: float


def sensitivity(
    out: Path, *, tokens: int = 1024, share: float = 0.43, told: Callable[[str], object] = lambda _: None
) -> Sensitivity:
    """Measure each block of the workers in `out`'s last complete checkpoint, and select a part of the parameters.

    Distances are `all_pairs` of the live models on held-out text, in fp32. Blocks are taken one after another: always
    the one that drops the distance most per byte, measured beside those already taken, as long as it brings the
    selection nearer to `share`. All workers' parameters are held on the host at once; the probe runs where the run did.

    Args: out: run directory. tokens: of held-out text that are read, if there are as many. share: part of the
    parameters to select, in (0, 1]. told: hears what is being measured.
    Raises: UsageError without a run, or where there is nothing to measure or select; CheckpointError without a complete
    checkpoint; DataError, ModelError where the run's text or model is not the same any more.
    """
    run, fingerprint = _read(out)
    checkpoints = Checkpoints(out)
    if run.workers < 2:
        raise UsageError(f"{out} holds a run of one worker, which has nobody to differ from; give a run of two or more")
    step = max(checkpoints.steps(), default=None)
    if step is None:
        raise CheckpointError(f"{out} has no complete checkpoint yet; let the run go on to one, or give another run")
    batch, vocab = _held_out(out, run.data, fingerprint, tokens)
    told("reading the workers' parameters")
    model = make_model(run, vocab, None)
    workers = [_parameters(out, model, checkpoints.read(step, worker)[1]) for worker in range(run.workers)]
    if all(torch.equal(workers[0][name], each[name]) for each in workers for name in each):
        raise UsageError(
            f"the workers in {out} are equal at step {step}, so there is nothing to measure: a round has just closed, "
            "or gradients are averaged; end a run inside of a round, such as with --steps 30 --period 20"
        )
    team = Team(model, workers, batch, tokens)
    blocks = blocks_of(trainable(model))
    told("comparing the workers as they are")
    distance = team.distance([])
    if not math.isfinite(distance):
        raise UsageError(
            f"workers in {out} predict nan at step {step}, so their distance is none; give a run that converges"
        )
    drops: list[Drop] = []
    for block in blocks:
        told(f"{block.name} mixed")
        drops.append(Drop(block, distance - team.distance([block])))
    chosen, left = _select(team, blocks, share, told)
    part = sum(block.numel for block in chosen) / sum(block.numel for block in blocks)
    ranked = tuple(sorted(drops, key=lambda each: -each.per_megabyte))
    return Sensitivity(step, len(workers), team.tokens, distance, ranked, tuple(chosen), tuple(left), part)


class Team:
    """The workers' parameters, one model to put them in, and the probe.

    Args: model: on the device of the probe. workers: parameters by name, of each worker. batch: int64
    [rows, length + 1]; tokens: of it that count, at most.
    """

    def __init__(self, model: nn.Module, workers: Sequence[Mapping[str, Tensor]], batch: Tensor, tokens: int) -> None:
        self._model, self._workers = model, workers
        self._own = trainable(model)
        self._batch = batch.to(next(model.parameters()).device)
        self.tokens = min(tokens, batch[:, 1:].numel())
        self._mean = {name: torch.stack([worker[name] for worker in workers]).mean(0) for name in self._own}
        self._known: dict[frozenset[str], float] = {}

    def distance(self, mixed: Collection[Block]) -> float:
        """The distance between the workers if these blocks are the mean over workers in each of them."""
        names = frozenset(name for block in mixed for name in block.names)
        if names not in self._known:
            self._known[names] = all_pairs([self._probe(worker, names) for worker in self._workers])
        return self._known[names]

    def _probe(self, worker: Mapping[str, Tensor], mixed: frozenset[str]) -> Tensor:
        with torch.no_grad():
            for name, parameter in self._own.items():
                parameter.copy_((self._mean if name in mixed else worker)[name])
        return probe(self._model, self._batch)[: self.tokens]


def _select(
    team: Team, blocks: Sequence[Block], share: float, told: Callable[[str], object]
) -> tuple[list[Block], list[float]]:
    """Blocks in the order in which they are taken, and the distance after each."""
    total = sum(block.numel for block in blocks)
    goal = share * total
    chosen, left, taken = list[Block](), list[float](), 0
    while nearer := [
        block for block in blocks if block not in chosen and abs(taken + block.numel - goal) < abs(taken - goal)
    ]:
        distances: list[float] = []
        for block in nearer:
            told(f"{len(chosen)} blocks taken, {block.name} beside them")
            distances.append(team.distance([*chosen, block]))
        now = left[-1] if left else team.distance([])
        best = max(range(len(nearer)), key=lambda at: (now - distances[at]) / nearer[at].nbytes)
        chosen.append(nearer[best])
        left.append(distances[best])
        taken += nearer[best].numel
    if not chosen:
        smallest = min(blocks, key=lambda block: block.numel)
        least = smallest.numel / total
        raise UsageError(
            f"--share {share:g} of the parameters was asked for, but the smallest block, {smallest.name}, has "
            f"{least:.2g} of them; give --share {least:.2g} or more"
        )
    return chosen, left


def blocks_of(parameters: Mapping[str, Tensor]) -> list[Block]:
    """The blocks of a model, in its order.

    A parameter belongs to the module up to the first number in its dotted name (`model.layers.3`), as `strided` finds
    blocks; one without a number belongs to its module (`model.embed_tokens`).

    Example:
        >>> shapes = {name: torch.zeros(2) for name in ("embed.weight", "layers.0.up.weight", "layers.0.down.weight")}
        >>> [(block.patterns, block.numel) for block in blocks_of(shapes)]
        [(('embed.*',), 2), (('layers.0.*',), 4)]
    """
    groups: dict[str, list[str]] = {}
    for name in parameters:
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
        module = name[: number.end(1)] if number else name.rpartition(".")[0] or name
        groups.setdefault(module, []).append(name)
    return [
        Block(
            module,
            tuple(names),
            _patterns(module, names, parameters),
            sum(parameters[name].numel() for name in names),
            sum(parameters[name].nbytes for name in names),
        )
        for module, names in groups.items()
    ]


def _patterns(module: str, names: Sequence[str], every: Iterable[str]) -> tuple[str, ...]:
    """One pattern for the whole module where it matches exactly these parameters, else their names."""
    pattern = escape(module) + ".*"
    if [name for name in every if fnmatchcase(name, pattern)] == list(names):
        return (pattern,)
    return tuple(map(escape, names))


def _read(out: Path) -> tuple[Run, str]:
    """What a measurement needs of a run (not its method), and the fingerprint of its text.

    The config is parsed, not evaluated: the directory may be someone else's.
    """
    path = out / "config.json"
    if not path.exists():
        raise UsageError(f"{out} holds no run (there is no config.json in it); give the --out of an atoll train")
    value = ast.literal_eval
    try:
        config = json.loads(path.read_text())
        run = _arguments(ast.parse(config["run"], mode="eval").body)
        data = _arguments(run["data"])
        text = Data(value(data["source"]), value(data["tokenizer"]), length=value(data["length"]))
        device = value(run["device"]) if torch.cuda.is_available() else "cpu"
        named = {name: value(run[name]) for name in ("model", "init", "workers", "seed")}
        return Run(Method("any"), data=text, device=device, **named), config["data"]
    except (OSError, ValueError, KeyError, TypeError, SyntaxError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); give a run that this version of atoll wrote"
        ) from error


def _arguments(call: ast.expr) -> dict[str | None, ast.expr]:
    if not isinstance(call, ast.Call):
        raise ValueError(f"{ast.unparse(call)} where a value with its arguments belongs")
    return {keyword.arg: keyword.value for keyword in call.keywords}


def _held_out(out: Path, data: Data, fingerprint: str, tokens: int) -> tuple[Tensor, int]:
    """Held-out text of the run, in rows of the run's length where that many tokens are asked for, and the
    vocabulary."""
    corpus = load_corpus(data.source, bytes_tokenizer() if data.tokenizer == "bytes" else hub_tokenizer(data.tokenizer))
    if corpus.fingerprint != fingerprint:
        raise DataError(
            f"{data.source} has fingerprint {corpus.fingerprint} now, but {out} was trained on {fingerprint}, so what "
            "is held out may have been trained on; bring back the text, or the interpreter if it is builtin"
        )
    length = min(data.length, tokens)
    (batch,) = held_out_batches(corpus, batch=-(-tokens // length), length=length, most=1)
    return batch, corpus.vocab


def _parameters(out: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The trained parameters of one worker's part of a checkpoint."""
    wanted = trainable(model)
    own = {name: tensors.get(f"model.{name}") for name in wanted}
    found = {name: tensor for name, tensor in own.items() if tensor is not None and tensor.shape == wanted[name].shape}
    if len(found) < len(wanted):
        raise ModelError(
            f"{out} was trained with a module of the caller's own, which its config does not name; give a run of a "
            "named size or a pretrained model, or compare workers with atoll.train.disagreement"
        )
    return found
