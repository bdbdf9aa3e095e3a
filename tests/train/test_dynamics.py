"""Workers that come, go, fail, and differ in speed and precision: against a plain loop, bit for bit."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import Tensor

from atoll.errors import UsageError
from atoll.faults import Death, Fault, Faults, Freeze, Slowness
from atoll.peers.faults import Dropping
from atoll.peers.memory import Hub
from atoll.recipes import methods
from atoll.train.checkpoint import Checkpoints
from atoll.train.corpus import load_corpus
from atoll.train.dynamics import POOLS, Dynamics
from atoll.train.evaluate import held_out_loss
from atoll.train.inner import autocast
from atoll.train.material import EVALUATED, ROWS
from atoll.train.model import next_token_loss
from atoll.train.run import Result, Run
from atoll.train.shards import by_domain, held_out_batches, iid, make_shards
from atoll.train.tokens import bytes_tokenizer
from atoll.train.trainer import train
from atoll.train.waits import Waits
from atoll.trees import digest
from atoll.wire import Key
from tests.train.reef import Reef, check_resumes, copies, go, records, small

BATCH, LENGTH, PERIOD, LR, MOMENTUM = 2, 16, 2, 0.7, 0.9
TOKENS = BATCH * LENGTH
TAKING_PART = {
    "constant": [4, 4, 4, 4, 4, 4, 4, 4],
    "doubling": [2, 2, 2, 2, 4, 4, 4, 4],
    "halving": [4, 4, 4, 4, 2, 2, 2, 2],
    "ramp-up": [1, 1, 2, 2, 3, 3, 4, 4],
    "ramp-down": [4, 4, 3, 3, 2, 2, 1, 1],
}
"""Workers that train in each of eight steps, of four, where a round has two."""


def adamw(model: Reef) -> torch.optim.AdamW:
    """Of torch, as the runs' own: matrices decay, vectors do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)


def rate(done: int, steps: int) -> float:
    """Two steps of warm-up, then a cosine over the run."""
    return done / 2 if done < 2 else 0.5 * (1 + math.cos(math.pi * min(1.0, (done - 2) / (steps - 2))))


class Plain:
    """DiLoCo as a person would write it: models, torch's AdamW, batches of the run's text, one anchor, one momentum."""

    def __init__(self, text: Path, workers: int, steps: int) -> None:
        self.steps = steps
        self.corpus = load_corpus(f"text:{text}", bytes_tokenizer())
        self.shards = make_shards(self.corpus, iid(), workers=workers, batch=BATCH, length=LENGTH, seed=0)
        self.models = [Reef() for _ in range(workers)]
        self.inner = [adamw(model) for model in self.models]
        self.anchor = [parameter.detach().clone() for parameter in Reef().parameters()]
        self.momentum = [torch.zeros_like(each) for each in self.anchor]

    def train(self, worker: int, tick: int) -> None:
        """One inner step in this tick."""
        model, inner = self.models[worker], self.inner[worker]
        next_token_loss(model, self.shards[worker].next_batch()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in inner.param_groups:
            group["lr"] = 1e-2 * rate(tick - 1, self.steps)
        inner.step()
        inner.zero_grad()

    def outer_step(self, workers: Sequence[int], unheard: Collection[int] = ()) -> None:
        """Average the deltas that are heard, if they are more than half; who was heard adopts the new anchor."""
        heard = [worker for worker in workers if worker not in unheard]
        if 2 * len(heard) <= len(workers):
            return
        for at, (anchor, momentum) in enumerate(zip(self.anchor, self.momentum, strict=True)):
            total = torch.zeros_like(anchor)
            for worker in heard:
                total += anchor - self.live(worker)[at]
            mean = total / len(heard)
            momentum.mul_(MOMENTUM).add_(mean)
            anchor -= (mean + momentum * MOMENTUM) * LR
        for worker in heard:
            self.adopt(worker)

    def adopt(self, worker: int) -> None:
        """Start from the anchor."""
        for live, anchor in zip(self.live(worker), self.anchor, strict=True):
            live.copy_(anchor)

    def join(self, worker: int) -> None:
        """From the anchor, with an inner optimizer that remembers nothing."""
        self.adopt(worker)
        self.inner[worker] = adamw(self.models[worker])

    def live(self, worker: int) -> list[Tensor]:
        return [parameter.detach() for parameter in self.models[worker].parameters()]

    def check(self, result: Result) -> None:
        """The run has this anchor and these workers, to the bit."""
        names = [name for name, _ in Reef().named_parameters()]
        assert result.digest == digest(dict(zip(names, self.anchor, strict=True)))
        held_out = held_out_batches(self.corpus, batch=ROWS, length=LENGTH, most=EVALUATED)
        losses = [held_out_loss(model, held_out, autocast("fp32")) for model in self.models]
        assert result.val_loss_workers == tuple(losses)


def diloco(text: Path, period: int = PERIOD, **options: object) -> Run:
    return small(text, methods.diloco(period, LR, MOMENTUM), **options)


def losses(out: Path) -> list[list[float]]:
    """Of those who took part, at each step."""
    return [record["loss"] for record in records(out) if record["kind"] == "step"]


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record losses at every step."""
    monkeypatch.setattr("atoll.train.trainer.LOG_EVERY", 1)


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("pool", POOLS)
def test_a_pool_decides_who_trains_when_and_diloco_with_it_is_a_plain_loop(
    pool: str, text: Path, tmp_path: Path
) -> None:
    sizes = TAKING_PART[pool]
    result = go(diloco(text, workers=4, steps=8, dynamics=Dynamics(pool=POOLS[pool])), out=tmp_path / "run")
    assert [len(each) for each in losses(tmp_path / "run")] == sizes
    assert result.tokens == sum(sizes) * TOKENS
    plain = Plain(text, workers=4, steps=8)
    for tick, size in enumerate(sizes, 1):
        for worker in range(size):
            plain.train(worker, tick)
        if tick % PERIOD == 0:
            plain.outer_step(range(size))
            for worker in range(size, sizes[tick] if tick < len(sizes) else size):
                plain.join(worker)
    plain.check(result)


def test_after_the_last_step_nobody_comes_or_goes_so_the_model_evaluated_is_the_one_exported(
    text: Path, tmp_path: Path
) -> None:
    """Three of five take part at the end, each with an anchor of its own; after one step more it would be one."""
    run = small(text, methods.local_m1(5), workers=5, steps=10, dynamics=Dynamics(pool=POOLS["ramp-down"]))
    result = go(run, out=tmp_path / "run")
    exported = Reef()
    load_model(exported, str(tmp_path / "run" / "model" / "model.safetensors"))
    corpus = load_corpus(f"text:{text}", bytes_tokenizer())
    held_out = held_out_batches(corpus, batch=ROWS, length=LENGTH, most=EVALUATED)
    assert held_out_loss(exported, held_out, autocast("fp32")) == result.val_loss


def test_who_joins_gossip_starts_from_the_anchor_and_momentum_of_worker_0(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small(text, methods.local_m1(3), workers=4, dynamics=Dynamics(pool=POOLS["doubling"]))
    _, found = copies(run, tmp_path / "whole", monkeypatch, save_every=6)
    first, *others = [Checkpoints(found[6]).read(6, worker)[1] for worker in range(4)]
    for joined in others[1:]:
        live = torch.cat([joined[f"model.{name}"].flatten() for name, _ in Reef().named_parameters()])
        assert torch.equal(live, first["sync.anchor.0"])
        for name in ("anchor.0", "outer.1.0.momentum"):
            assert torch.equal(joined[f"sync.{name}"], first[f"sync.{name}"])
        assert not [name for name in joined if name.startswith("inner.")]
    assert not torch.equal(others[0]["sync.anchor.0"], first["sync.anchor.0"]), "worker 1 was there before"


def test_who_joins_keeps_its_own_share_of_the_data(text: Path, tmp_path: Path) -> None:
    uneven = tmp_path / "uneven"
    uneven.mkdir()
    for number in range(4):
        (uneven / f"{number}.txt").write_text((text / "0.txt").read_text()[: 10_000 * (number + 1)])
    corpus = load_corpus(f"text:{uneven}", bytes_tokenizer())
    shards = make_shards(corpus, by_domain(), workers=4, batch=BATCH, length=LENGTH, seed=0)
    mean = sum(shard.size for shard in shards) / 4
    run = diloco(uneven, workers=4, dynamics=Dynamics(pool=POOLS["ramp-up"]))
    go(replace(run, data=replace(run.data, sharding=by_domain())), out=tmp_path / "run")
    checkpoints = Checkpoints(tmp_path / "run")
    shares = [checkpoints.read(12, worker)[0]["sync"]["work"][2] for worker in range(4)]
    assert shares == [shard.size / mean for shard in shards]
    assert len(set(shares)) == 4


@pytest.mark.parametrize("name", ["diloco", "eager", "factored-gossip", "sparseloco", "decoupled", "async-local-sgd"])
def test_a_run_resumes_in_the_middle_of_a_ramp(
    name: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = methods.decoupled(3, fragments=2) if name == "decoupled" else methods.METHODS[name](3)
    run = small(text, method, workers=4, dynamics=Dynamics(pool=POOLS["ramp-up"]))
    found = check_resumes(run, tmp_path / "whole", monkeypatch, save_every=4)
    assert list(found) == [4, 8, 12]


def test_a_worker_that_is_not_heard_keeps_its_own_as_in_a_plain_loop(text: Path) -> None:
    dropping = Dropping(0.4, seed=0)
    run = diloco(text, workers=3, steps=12, faults=Faults(loss=0.4))
    plain, lost = Plain(text, workers=3, steps=12), 0
    for tick in range(1, 13):
        for worker in range(3):
            plain.train(worker, tick)
        if tick % PERIOD == 0:
            unheard = dropping(Key(0, 0, tick // PERIOD - 1), range(3))
            lost += len(unheard)
            plain.outer_step(range(3), unheard)
    assert 0 < lost < 3 * 6
    plain.check(go(run))


@pytest.mark.parametrize("name", ["diloco", "opendiloco-sparse", "data-parallel", "streaming"])
def test_where_messages_are_lost_anchors_stay_equal_and_the_seed_decides_which(
    name: str, text: Path, tmp_path: Path
) -> None:
    make = methods.METHODS[name]
    method = make() if name == "data-parallel" else make(3)
    run = small(text, method, workers=3, faults=Faults(loss=0.3))
    result = go(run, out=tmp_path / "run")
    checkpoints = Checkpoints(tmp_path / "run")
    first, *others = [checkpoints.read(12, worker)[1] for worker in range(3)]
    prefix = "model." if name == "data-parallel" else "sync.anchor."
    shared = [place for place in first if place.startswith(prefix)]
    assert shared
    assert all(torch.equal(first[place], other[place]) for other in others for place in shared)
    assert result.digest == go(run).digest
    assert result.digest != go(replace(run, faults=Faults())).digest


def test_probability_zero_is_a_run_without_faults(text: Path) -> None:
    run = diloco(text)
    hub = Hub(2, Dropping(0.0))
    result = train(run, [hub.group(worker) for worker in range(2)], build=Reef, quiet=True)
    assert replace(result, wall_s=0.0) == replace(go(run), wall_s=0.0)


def test_diloco_waits_for_the_slowest_as_in_a_plain_loop(text: Path) -> None:
    """Sixteen ticks: the fast worker takes four steps and waits for as long, the slow one takes every second."""
    run = diloco(text, period=4, steps=16, dynamics=Dynamics(speeds=(1.0, 0.5)))
    result = go(run)
    assert (result.rounds, result.tokens) == (2, 2 * 8 * TOKENS)
    plain = Plain(text, workers=2, steps=16)
    for first in (0, 8):
        for tick in (1, 2, 3, 4):
            plain.train(0, first + tick)
        for tick in (2, 4, 6, 8):
            plain.train(1, first + tick)
        plain.outer_step(range(2))
    plain.check(result)


@pytest.mark.parametrize("save_every", [1, 4, 6])
def test_a_checkpoint_is_put_off_while_somebody_waits(
    save_every: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = diloco(text, period=4, steps=14, dynamics=Dynamics(speeds=(1.0, 0.5)))
    found = check_resumes(run, tmp_path / "whole", monkeypatch, save_every=save_every)
    whole = [step for step in range(1, 15) if step < 4 or 8 <= step < 12 or step == 14]
    due = {next(later for later in whole if later >= step) for step in range(save_every, 15, save_every)} | {14}
    assert set(found) == due


def test_nobody_waits_for_a_keeper_and_the_periods_of_slower_workers_match_their_speed(
    text: Path, tmp_path: Path
) -> None:
    """Steps of three workers in sixteen ticks: 16, 12 and 8, in rounds of 4, floor(0.75 * 4) and 2 (DyLU)."""
    run = small(text, methods.async_local_sgd(4), workers=3, steps=16, dynamics=Dynamics(speeds=(1.0, 0.75, 0.5)))
    result = go(run, out=tmp_path / "run")
    assert result.tokens == (16 + 12 + 8) * TOKENS
    checkpoints = Checkpoints(tmp_path / "run")
    states = [checkpoints.read(16, worker)[0]["sync"] for worker in range(3)]
    assert [state["work"][0] for state in states] == [16, 12, 8]
    assert [state["tracks"][0][0] for state in states] == [16 // 4, 12 // 3, 8 // 2]
    assert result.rounds == 12


@pytest.mark.usefixtures("every_step")
def test_precision_is_each_workers_own_and_the_anchor_is_one(text: Path, tmp_path: Path) -> None:
    runs = {precision: diloco(text, precision=precision, clip=1e9) for precision in ("fp32", "bf16", "fp32,bf16")}
    results = {name: go(run, out=tmp_path / name) for name, run in runs.items()}
    first = {name: losses(tmp_path / name)[0] for name in runs}
    assert first["fp32,bf16"] == [first["fp32"][0], first["bf16"][1]]
    assert first["fp32"][1] != first["bf16"][1]
    mine, theirs = (Checkpoints(tmp_path / "fp32,bf16").read(12, worker)[1] for worker in range(2))
    assert torch.equal(mine["sync.anchor.0"], theirs["sync.anchor.0"])
    assert len({result.digest for result in results.values()}) == 3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dynamics": Dynamics(speeds=(1.0, 0.0))}, "--speeds was 1.0,0.0, but they are parts of the fastest worker's"),
        ({"dynamics": Dynamics(speeds=(0.5, 0.5))}, "give 1 to that one, and more than 0 to all"),
        ({"dynamics": Dynamics(speeds=(1.0, math.nan))}, "--speeds was 1.0,nan"),
        (
            {"dynamics": Dynamics(speeds=(1.0, 1.0, 0.5))},
            "--speeds gave 3 speeds, but there are 2 workers; give .* 1,0.5",
        ),
        ({"dynamics": Dynamics(pool=POOLS["halving"], speeds=(1.0, 0.5))}, "--pool and --speeds were both given"),
        ({"precision": "fp16"}, "there is no precision 'fp16'; give one of fp32, bf16"),
        ({"precision": "fp32,fp16"}, "there is no precision 'fp16'"),
        ({"precision": "fp32,bf16,bf16"}, "--precision was fp32,bf16,bf16, but there are 2 workers"),
    ],
)
def test_what_does_not_fit_the_workers_is_a_sentence(options: dict[str, object], sentence: str, text: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        diloco(text, **options)


def test_averaged_gradients_know_no_slower_worker(text: Path) -> None:
    with pytest.raises(UsageError, match=r"data-parallel averages gradients within a step.*leave --speeds out"):
        go(small(text, methods.data_parallel(), dynamics=Dynamics(speeds=(1.0, 0.5))))


@pytest.mark.parametrize(
    "options",
    [
        {"dynamics": Dynamics(pool=POOLS["halving"])},
        {"dynamics": Dynamics(speeds=(1.0, 0.5))},
        {"faults": Faults(loss=0.1)},
    ],
)
def test_an_experiment_needs_all_workers_in_one_process(options: dict[str, Any], text: Path) -> None:
    with pytest.raises(UsageError, match="experiments with all workers in one process; start them without torchrun"):
        train(diloco(text, **options), [Hub(2).group(0)], build=Reef, quiet=True)


def test_a_keeper_needs_all_workers_in_one_process(text: Path) -> None:
    with pytest.raises(UsageError, match="async-local-sgd has a keeper, which here needs all workers in one process"):
        train(small(text, methods.async_local_sgd(4)), [Hub(2).group(0)], build=Reef, quiet=True)


class Clock:
    """Real time, as the trainer asks for it, without waiting for it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_freezes_and_slow_steps_of_a_faults_file_are_waited_for_on_real_time(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 2 s: the first is frozen for 3 s, the second takes 3 times as long for its first 3 s, that is 4 s."""
    events = (Freeze(0, 1.0, 3.0), Slowness(0, 5.0, 3.0, factor=3.0), Freeze(1, 0.0, 30.0))
    clock, run = Clock(), diloco(text, workers=1, steps=6, faults=Faults(events))
    monkeypatch.setattr("atoll.train.waits.time", clock)
    waits, ends = Waits(run, here=1), list[float]()
    for _ in range(3):
        waits.begin()
        clock.now += 2.0
        waits.carry_out(0)
        ends.append(clock.now - 1000.0)
    assert ends == pytest.approx([5.0, 9.0, 11.0])
    monkeypatch.undo()
    short = replace(run, faults=Faults((Freeze(0, 0.0, 0.01),)))
    assert go(short).digest == go(replace(run, faults=Faults())).digest


@pytest.mark.parametrize(
    ("event", "workers", "sentence"),
    [
        (Death(0, 3.0), 1, "the death of island 0 at 3s, which a run on real time cannot carry out here"),
        (Freeze(1, 3.0, 2.0), 2, "all workers take turns in one process, so none is slower than another"),
    ],
)
def test_what_real_time_cannot_do_is_for_the_simulator(event: Fault, workers: int, sentence: str, text: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        go(diloco(text, workers=workers, faults=Faults((event,))))
