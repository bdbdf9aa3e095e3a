"""What a run is: a frozen value that its `repr` rebuilds, and the record of what came out."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from atoll.errors import UsageError
from atoll.faults import Faults
from atoll.files import finite
from atoll.sync.rule import Carry, Strategy
from atoll.train.dynamics import Dynamics
from atoll.train.inner import AdamW, Inner, autocast
from atoll.train.shards import Sharding, iid

MOST_LOAD = 1000


@dataclass(frozen=True)
class Method:
    """A strategy with its inner optimizer.

    Args: name: as on the command line. strategy: what is synced. inner: how a worker trains. period: inner steps per
    round, if it has one.
    """

    name: str
    strategy: Strategy = Strategy()
    inner: Inner = AdamW()
    period: int | None = None


@dataclass(frozen=True)
class Data:
    """What is read, and in which portions.

    Args: source: builtin, text:PATH or hf:NAME. tokenizer: bytes, or a Hugging Face tokenizer's path or name.
    sharding: how workers share it.
        batch: sequences per worker and micro-batch; length: tokens per sequence that are predicted.
    """

    source: str = "builtin"
    tokenizer: str = "bytes"
    sharding: Sharding = iid()
    batch: int = 8
    length: int = 128


@dataclass(frozen=True)
class Run:
    """Everything that decides the numbers of a run.

    Args:
        method: how workers train and sync. model: a named size, or init: a pretrained model's path or hub name.
        workers: k. steps: inner steps per worker. accumulate: micro-batches per inner step. loads: of each worker,
        how many times as many it trains in one, where some are faster than others; once each if empty.
        warmup: inner steps of linear warm-up, then cosine over the whole run. clip: largest gradient norm.
        device: cpu, or cuda. precision: fp32, or bf16 for autocast; one for all workers, or one for each with commas
        between. seed: of weights, data order and dropout. threads: intra-op threads, which change bits.
        probe: tokens of held-out text on which workers' predictions are compared each round; 0 for never.
        dynamics: what is not ideal about the workers. faults: what goes wrong, and when.
    """

    method: Method
    model: str = "tiny"
    init: str | None = None
    data: Data = field(default_factory=Data)
    workers: int = 4
    steps: int = 1000
    accumulate: int = 1
    loads: tuple[int, ...] = ()
    warmup: int = 50
    clip: float = 1.0
    device: str = "cpu"
    precision: str = "fp32"
    seed: int = 0
    threads: int = 1
    probe: int = 512
    dynamics: Dynamics = Dynamics()
    faults: Faults = Faults()

    def __post_init__(self) -> None:
        for name in ("workers", "steps", "accumulate", "threads"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"--{name} was {getattr(self, name)}, but a run needs at least one; give --{name} 1 or more"
                )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError(
                "--device cuda was given, but PyTorch sees no CUDA device here; leave it out to train on the CPU"
            )
        self._check_loads()
        self.dynamics.check(self.workers)
        if self.precision.count(",") not in (0, self.workers - 1):
            raise UsageError(
                f"--precision was {self.precision}, but there are {self.workers} workers; give one for all, or one for "
                "each with commas between"
            )
        for worker in range(self.workers):
            autocast(self.precision_of(worker))
        if self.method.period and self.method.period > self.steps:
            raise UsageError(
                f"--period {self.method.period} is longer than the run's --steps {self.steps}, so no round would ever "
                "close; "
                f"give a period of at most {self.steps}, or more steps"
            )

    def _check_loads(self) -> None:
        if self.loads and (len(self.loads) != self.workers or min(self.loads) < 1 or max(self.loads) > MOST_LOAD):
            raise UsageError(
                f"--loads was {','.join(map(str, self.loads))}, but there are {self.workers} workers, and each must "
                f"train something; give a whole number from 1 to {MOST_LOAD} for each, such as "
                f"{','.join(['2'] + ['1'] * (self.workers - 1))}"
            )
        if self.loads and any(rule.carry is Carry.GRADIENT for rule in self.method.strategy.rules):
            raise UsageError(
                f"{self.method.name} averages gradients within a step, all with one weight, so no worker can train "
                "more than another; leave --loads out"
            )

    def load_of(self, worker: int) -> int:
        """How many times `accumulate` micro-batches a worker trains in an inner step."""
        return self.loads[worker] if self.loads else 1

    def precision_of(self, worker: int) -> str:
        """What the forward pass of a worker computes in."""
        each = self.precision.split(",")
        return each[worker % len(each)]


@dataclass(frozen=True)
class Simulated:
    """What a run would have taken on a network.

    Args: seconds: until the last island had trained. utilisation: part of the islands' time spent training. times:
    seconds at each point of the run's curve.
    """

    seconds: float
    utilisation: float
    times: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    """What a run came to. Losses are nats per token on held-out text; bytes are those handed to links by one worker.

    Args: rounds: most landings of any fragment. tokens: trained by all workers. val_loss: of the shared model;
    val_loss_workers: of each worker's live model.
    """

    method: str
    workers: int
    steps: int
    rounds: int
    period: int | None
    tokens: int
    val_loss: float
    val_loss_workers: tuple[float, ...]
    bytes_sent_per_worker: int
    wall_s: float
    digest: str
    seed: int
    data: str
    """fingerprint of the text and tokenizer"""
    curve: tuple[tuple[int, int, float], ...] = ()
    """(inner steps, bytes sent per worker, val_loss of the shared model) along the way"""
    disagreement: tuple[tuple[int, float, float], ...] = ()
    """(inner steps, Jensen-Shannon distance of predictions, relative L2 distance of weights) at each round's end"""
    simulated: Simulated | None = None
    """on virtual time"""

    @property
    def js(self) -> float | None:
        """The Jensen-Shannon distance between workers at the end of a round, mean over the last quarter of the run."""
        last = [js for step, js, _ in self.disagreement if step > 0.75 * self.steps]
        return sum(last) / len(last) if last else None

    def as_json(self) -> dict[str, Any]:
        """A JSON-able object with the fields' names; nan and inf, which JSON does not know, as None."""
        return finite(asdict(self))

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> "Result":
        """The result again, with nan for what JSON could not hold."""
        values: dict[str, Any] = dict(saved)
        values["val_loss"] = _number(saved["val_loss"])
        values["val_loss_workers"] = tuple(map(_number, saved["val_loss_workers"]))
        values["disagreement"] = tuple(
            (step, _number(js), _number(l2)) for step, js, l2 in saved.get("disagreement", ())
        )
        if virtual := saved.get("simulated"):
            values["simulated"] = Simulated(**virtual | {"times": tuple(virtual["times"])})
        values["curve"] = tuple((step, sent, _number(loss)) for step, sent, loss in saved["curve"])
        return Result(**values)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
