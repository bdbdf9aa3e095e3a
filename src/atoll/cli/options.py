"""The options of each command beside a method's own, as a person gives them. Commands derive their flags from these."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from atoll.cli.values import AtLeast, Count, Positive
from atoll.errors import UsageError
from atoll.faults import Faults
from atoll.parts.mixers import by_share, by_tokens
from atoll.recipes.methods import weigh
from atoll.train.dynamics import POOLS, Dynamics
from atoll.train.inner import AdamW, Inner, Muon
from atoll.train.run import Data, Method, Run
from atoll.train.shards import by_domain, iid

INNERS = {"adamw": AdamW, "muon": Muon}
SHARDINGS = {"iid": iid(), "by-domain": by_domain()}
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Options:
    """Options of a run, whatever the method.

    Args:
        workers: replicas of the model, each with data of its own; 4 by default, and 1 for a method that never syncs
        steps: inner steps of each worker
        seed: of weights, data order and dropout
        data: builtin, text:PATH (a file or folder of text, JSON lines or Parquet) or hf:NAME (streamed from the hub)
        model: a named size
        init: start from this pretrained model (a path or a hub name) instead of a named size
        tokenizer: bytes, or the path or hub name of a Hugging Face tokenizer
        shards: how workers share the data; by-domain gives each whole domains and weighs deltas by their size
        batch: sequences per worker and micro-batch
        length: tokens per sequence
        accumulate: micro-batches per inner step
        loads: how many times as many each worker trains in one, such as 4,2,1,1 where some are faster, so that none
        waits; deltas are then weighed by tokens. Once each if left out
        lr: peak learning rate of the inner optimizer (of Muon, not of its AdamW part); its own default if left out
        weight_decay: of the inner optimizer; its own default if left out
        inner: inner optimizer; the method's if left out
        warmup: inner steps of linear warm-up, then cosine to the end; 50, or a tenth of a shorter run, if left out
        clip: largest norm of a gradient
        device: where workers train
        precision: fp32 or bf16, for all workers or for each with commas between; bf16 is autocast, parameters stay fp32
        threads: intra-op threads; they change bits
        probe: tokens of held-out text on which workers are compared at the end of each round; 0 for never
        pool: workers that take part over time; one that joins starts from the anchors of worker 0
        drop: probability that a message is lost; its worker keeps its own parameters
        speeds: of each worker, as parts of the fastest one's, such as 1,1,0.5,0.25; all alike if left out
        faults: a TOML file of what goes wrong, and when; on real time freezes, slow steps and lost messages only
    """

    workers: Count | None = None
    steps: Count = Run.steps
    seed: Annotated[int, AtLeast(0)] = Run.seed
    data: str = Data.source
    model: str = Run.model
    init: str | None = None
    tokenizer: str = Data.tokenizer
    shards: Literal["iid", "by-domain"] = "iid"
    batch: Count = Data.batch
    length: Count = Data.length
    accumulate: Count = Run.accumulate
    loads: str | None = None
    lr: Positive | None = None
    weight_decay: Annotated[float, AtLeast(0)] | None = None
    inner: Literal["adamw", "muon"] | None = None
    warmup: Annotated[int, AtLeast(0)] | None = None
    clip: Positive = Run.clip
    device: Literal["cpu", "cuda"] = "cpu"
    precision: str = "fp32"
    threads: Count = Run.threads
    probe: Annotated[int, AtLeast(0)] = Run.probe
    pool: Literal["constant", "doubling", "halving", "ramp-up", "ramp-down"] = "constant"
    drop: Annotated[float, AtLeast(0)] = 0.0
    speeds: str | None = None
    faults: Path | None = None

    def run(self, method: Method) -> Run:
        """The run of `method` with these options.

        Raises: UsageError if they do not fit one another.
        """
        method = replace(method, inner=self._inner(method.inner))
        loads = _numbers("--loads", self.loads, int, "2,1 for a first worker that trains twice as much")
        if loads or self.shards == "by-domain":
            method = weigh(method, by_tokens() if loads else by_share())
        speeds = _numbers("--speeds", self.speeds, float, "1,0.5 for a second worker that is half as fast")
        workers = self.workers or (Run.workers if method.strategy.rules else 1)
        faults = Faults.read(self.faults) if self.faults else Faults()
        if workers == 1:
            faults = faults.alone()
        if not 0 <= self.drop < 1:
            raise UsageError(f"--drop was {self.drop}, but it is a probability, and some must arrive; give 0 to 0.99")
        if self.drop and faults.loss:
            raise UsageError(f"--drop was given, and {self.faults} has a loss too; leave one of them out")
        if self.drop:
            faults = replace(faults, loss=self.drop, seed=self.seed)
        return Run(
            method,
            model=self.model,
            init=self.init,
            data=Data(self.data, self.tokenizer, SHARDINGS[self.shards], self.batch, self.length),
            workers=workers,
            steps=self.steps,
            accumulate=self.accumulate,
            loads=loads,
            warmup=min(Run.warmup, self.steps // 10) if self.warmup is None else self.warmup,
            clip=self.clip,
            device=self.device,
            precision=self.precision,
            seed=self.seed,
            threads=self.threads,
            probe=self.probe,
            dynamics=Dynamics(POOLS[self.pool], speeds),
            faults=faults,
        )

    def _inner(self, own: Inner) -> Inner:
        given = {"lr": self.lr, "weight_decay": self.weight_decay}
        changes = {name: value for name, value in given.items() if value is not None}
        return replace(INNERS[self.inner]() if self.inner else own, **changes)


def _numbers(flag: str, words: str | None, kind: type[N], example: str) -> tuple[N, ...]:
    """One for each worker."""
    try:
        return tuple(kind(word) for word in words.split(",")) if words else ()
    except ValueError:
        whole = "whole numbers" if kind is int else "numbers"
        raise UsageError(
            f"{flag} was {words!r}, but it takes {whole} with commas between, one for each worker; give {example}"
        ) from None


@dataclass(frozen=True)
class Keeping:
    """What `atoll train` keeps and shows.

    Args:
        out: run directory for config, metrics, picture, checkpoints and model; nothing is written without one
        resume: go on from the last complete checkpoint in --out
        save_every: inner steps between checkpoints; the period if left out
        json: end with one line of JSON on stdout; everything else goes to stderr
    """

    out: Path | None = None
    resume: bool = False
    save_every: Count | None = None
    json: bool = False

    def __post_init__(self) -> None:
        given = "--resume" if self.resume else "--save-every" if self.save_every else None
        if given and not self.out:
            raise UsageError(f"{given} was given without a run directory; give --out DIR too")


@dataclass(frozen=True)
class Comparing:
    """What `atoll compare` repeats, keeps and shows.

    Args:
        period: of every method that has one and is not given its own, as in diloco:period=10
        seeds: runs of each method, with seeds SEED, SEED + 1, ...
        jobs: runs side by side; as many as there are cores if left out
        out: directory for compare.json, compare.png and the runs; the first free one of runs/compare, runs/compare-2,
        ... if left out
        resume: go on with the comparison in --out; finished runs are not repeated
        save_every: inner steps between checkpoints; the period if left out
        json: end with one line of JSON on stdout; everything else goes to stderr
    """

    period: Count | None = None
    seeds: Count = 1
    jobs: Count | None = None
    out: Path | None = None
    resume: bool = False
    save_every: Count | None = None
    json: bool = False

    def __post_init__(self) -> None:
        if self.resume and not self.out:
            raise UsageError("--resume was given without the directory of the comparison; give --out DIR too")

    def directory(self) -> Path:
        """Where to write."""
        number, folder = 1, self.out or Path("runs/compare")
        while not self.out and folder.exists():
            number += 1
            folder = Path(f"runs/compare-{number}")
        return folder


@dataclass(frozen=True)
class Simulating:
    """The virtual network of a run.

    Args:
        network: of each worker's link, such as 100Mbit or 100Mbit,50ms (one way), or a TOML file of islands and links
        step_time: simulated seconds of an inner step of the fastest worker, where --network is no file
        jitter: standard deviation of a step's duration, as a part of it, where --network is no file
    """

    network: str | None = None
    step_time: Positive | None = None
    jitter: Annotated[float, AtLeast(0)] = 0.0


@dataclass(frozen=True)
class Showing:
    """What `atoll simulate` keeps and shows.

    Args:
        out: run directory for config, network, faults, metrics, pictures, trace and model; nothing is written without
        one
        json: end with one line of JSON on stdout; everything else goes to stderr
    """

    out: Path | None = None
    json: bool = False


@dataclass(frozen=True)
class Asking:
    """What `atoll explain` is asked.

    Args:
        model: a named size
        vocab: tokens of the tokenizer, for sizes without a vocabulary of their own (256 for bytes)
        workers: replicas of the model
        steps: inner steps of the run
        bandwidth: of each worker's link, such as 100Mbit or 12MB
        step_time: seconds of an inner step
        cite: print the paper as BibTeX instead
        as_loop: print the method as a plain loop instead
    """

    model: str = Run.model
    vocab: Count = 256
    workers: Count = Run.workers
    steps: Count = Run.steps
    bandwidth: str | None = None
    step_time: Positive | None = None
    cite: bool = False
    as_loop: bool = False


@dataclass(frozen=True)
class Measuring:
    """What `atoll sensitivity` measures, selects and shows.

    Args:
        tokens: of held-out text that the workers are compared on
        share: part of the parameters to select; blocks are taken as long as one brings the selection nearer to it
        json: end with one line of JSON on stdout; everything else goes to stderr
    """

    tokens: Count = 1024
    share: Positive = 0.43
    json: bool = False

    def __post_init__(self) -> None:
        if self.share > 1:
            raise UsageError(
                f"--share was {self.share:g}, but it is a part of the parameters; give at most 1, such as 0.43 for 43 %"
            )


PLANNED = {
    "params": (1.0, 1e15),
    "layers": (1, 1000),
    "workers": (1, 512),
    "period": (1, 1_000_000),
    "step_time": (1e-6, 1e6),
    "latency": (0.0, 1e6),
    "seed": (0, 2**63),
    "tokens": (1.0, 1e18),
    "tokens_per_step": (1, 10**12),
}
"""The least and the most that a plan is made for."""


@dataclass(frozen=True)
class Planning:
    """What `atoll plan` is asked.

    Args:
        model: a named size
        params: parameters of a model of which only the size is known, such as 1.5e9, instead of a named one
        layers: its blocks
        workers: islands
        period: inner steps of a round, of every method that has one and is not given its own, as in diloco:period=500
        step_time: seconds of an inner step; 1 if left out, and --flops too
        flops: that an island does per second, instead of --step-time, such as 1e15 for 8 GPUs at 40 % of their
        312e12; a step is 6 FLOP for each parameter and each of --tokens-per-step
        bandwidth: of each island's link, such as 100Mbit or 12MB; no limit if left out
        latency: milliseconds one way
        jitter: standard deviation of a step's duration, as a part of it
        failing: probability that each link fails in a meeting of more than two, which then begins again, as a ring does
        seed: of jitter and failures
        tokens: budget of the whole run
        tokens_per_step: that an island trains in an inner step
        paper: print a published table beside ours instead
        out: also draw utilisation against bandwidth into this PNG file
        json: end with JSON on stdout; everything else goes to stderr
    """

    model: str = "factored-gossip-1.5b"
    params: Positive | None = None
    layers: Count = 16
    workers: Count = 8
    period: Count = 100
    step_time: Positive | None = None
    flops: Positive | None = None
    bandwidth: str | None = None
    latency: Annotated[float, AtLeast(0)] = 0.0
    jitter: Annotated[float, AtLeast(0)] = 0.0
    failing: Annotated[float, AtLeast(0)] = 0.0
    seed: Annotated[int, AtLeast(0)] = 0
    tokens: Positive | None = None
    tokens_per_step: Count = 262_144
    paper: Literal["factored-gossip", "streaming", "scaling"] | None = None
    out: Path | None = None
    json: bool = False

    def __post_init__(self) -> None:
        for name, (least, most) in PLANNED.items():
            given = getattr(self, name)
            if given is not None and not least <= given <= most:
                raise UsageError(
                    f"--{name.replace('_', '-')} was {given}, but a plan is made for {least:g} to {most:g}; give a "
                    "number between"
                )
        if self.jitter >= 1:
            raise UsageError(f"--jitter was {self.jitter}, but it is a part of a step; give less than 1, such as 0.05")
        if self.failing > 0.5:
            raise UsageError(
                f"--failing was {self.failing}, but with so many links failing there is nothing to plan; give 0 to 0.5"
            )
        if self.step_time is not None and self.flops is not None:
            raise UsageError(
                "--step-time and --flops were both given, but each says how long an inner step takes; leave one out"
            )

    def step_s(self, parameters: int) -> float:
        """Seconds of an inner step of a model with so many parameters: 6 N tokens / FLOP/s, if they were given.

        Raises: UsageError for one that nobody plans for.
        """
        if self.flops is None:
            return self.step_time or 1.0
        found = 6.0 * parameters * self.tokens_per_step / self.flops
        least, most = PLANNED["step_time"]
        if not least <= found <= most:
            raise UsageError(
                f"--flops {self.flops:g} means {found:.3g} s for an inner step, but a plan is made for {least:g} to "
                f"{most:g} s; give another --flops or --tokens-per-step"
            )
        return found
