"""`atoll sensitivity`: its numbers against a plain recomputation from the checkpoint's files, and its sentences."""

import json
import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from atoll.cli import main
from atoll.peers.memory import Hub
from atoll.recipes.methods import local_sgd
from atoll.train.corpus import load_corpus
from atoll.train.run import Data, Run
from atoll.train.sensitivity import blocks_of
from atoll.train.tokens import bytes_tokenizer
from atoll.train.trainer import train
from tests.cli.conftest import Call

BLOCKS = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
TOKENS = 256


@pytest.fixture(scope="module")
def apart(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ends two steps after its workers last met."""
    out = tmp_path_factory.mktemp("runs") / "apart"
    options = ["--data", f"text:{text}", "--steps", "6", "--batch", "2", "--length", "16", "--warmup", "0"]
    assert main(["train", "local-sgd", "--period", "4", "--workers", "3", *options, "--out", str(out)]) == 0
    return out


def js(logs: Sequence[Tensor]) -> float:
    """Mean over pairs and tokens of the root of KL(p | m) / 2 + KL(q | m) / 2 in bits."""
    distances: list[Tensor] = []
    for lp, lq in combinations([log.double() for log in logs], 2):
        lm = torch.logaddexp(lp, lq) - math.log(2)
        jsd = ((lp.exp() * (lp - lm)).sum(-1) + (lq.exp() * (lq - lm)).sum(-1)) / (2 * math.log(2))
        distances.append(jsd.clamp_min(0).sqrt())
    return float(torch.stack(distances).mean())


class Plain:
    """The measurement in plain words: the workers' files, the run's exported model to put them in, rows of held-out
    text from all over."""

    def __init__(self, out: Path, text: Path) -> None:
        folder = out / "checkpoints" / "step-00000006"
        files = [load_file(folder / f"worker-{worker}.safetensors") for worker in range(3)]
        self.workers = [
            {name.removeprefix("model."): tensor for name, tensor in file.items() if name.startswith("model.")}
            for file in files
        ]
        self.model = AutoModelForCausalLM.from_pretrained(out / "model").eval()
        self.sizes = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        held_out = load_corpus(f"text:{text}", bytes_tokenizer()).held_out.long()
        count = len(held_out) // 17
        rows = [row * count // 16 for row in range(TOKENS // 16)]
        self.inputs = torch.stack([held_out[17 * row : 17 * row + 16] for row in rows])

    def numel(self, block: str) -> int:
        return sum(size for name, size in self.sizes.items() if name.startswith(block + "."))

    def distance(self, mixed: Sequence[str]) -> float:
        logs: list[Tensor] = []
        for worker in self.workers:
            values = {
                name: sum(each[name] for each in self.workers) / 3
                if any(name.startswith(block + ".") for block in mixed)
                else worker[name]
                for name in self.sizes
            }
            self.model.load_state_dict(values)
            with torch.no_grad():
                logs.append(self.model(self.inputs).logits.flatten(0, 1).log_softmax(-1))
        return js(logs)


def test_the_numbers_are_those_of_a_plain_recomputation(apart: Path, text: Path, atoll: Call) -> None:
    said = atoll("sensitivity", apart, "--tokens", str(TOKENS), "--share", "0.5", "--json")
    assert (said.status, said.out.count("\n")) == (0, 1)
    found = said.json
    plain = Plain(apart, text)
    start = plain.distance([])
    assert start > 0.01
    assert (found["step"], found["workers"], found["tokens"]) == (6, 3, TOKENS)
    assert found["distance"] == pytest.approx(start, abs=1e-6)
    assert {each["name"]: each["parameters"] for each in found["blocks"]} == {b: plain.numel(b) for b in BLOCKS}
    for each in found["blocks"]:
        drop = start - plain.distance([each["name"]])
        assert each["drop"] == pytest.approx(drop, abs=1e-6)
        assert each["nbytes"] == 4 * each["parameters"]
        assert each["drop_per_megabyte"] == pytest.approx(drop / (4e-6 * each["parameters"]), abs=1e-6 / 256e-6)
    slopes = [each["drop_per_megabyte"] for each in found["blocks"]]
    assert slopes == sorted(slopes, reverse=True)

    chosen, left, goal = list[str](), [start], 0.5 * sum(plain.sizes.values())
    while True:
        taken = sum(map(plain.numel, chosen))
        rest = [b for b in BLOCKS if b not in chosen and abs(taken + plain.numel(b) - goal) < abs(taken - goal)]
        if not rest:
            break
        chosen.append(max(rest, key=lambda b: (left[-1] - plain.distance([*chosen, b])) / plain.numel(b)))
        left.append(plain.distance(chosen))
    selection = found["selection"]
    assert selection["blocks"] == chosen
    assert selection["distances"] == pytest.approx(left[1:], abs=1e-6)
    assert selection["part"] == pytest.approx(sum(map(plain.numel, chosen)) / sum(plain.sizes.values()))
    wanted = [name for name in plain.sizes if any(name.startswith(block + ".") for block in chosen)]
    assert [n for n in plain.sizes if any(fnmatchcase(n, each) for each in selection["patterns"])] == wanted


def test_the_last_line_is_python_for_the_mixer(apart: Path, atoll: Call) -> None:
    said = atoll("sensitivity", apart, "--tokens", "64", "--share", "0.1")
    patterns = atoll("sensitivity", apart, "--tokens", "64", "--share", "0.1", "--json").json["selection"]["patterns"]
    made = eval(said.out.splitlines()[-1], {"only": lambda names, mixer: (names, mixer), "pairs": lambda seed: seed})
    assert made == (tuple(patterns), 0)
    assert "with this selection mixed" in said.out


def test_the_table_shows_every_block_and_a_picture_is_left_in_the_run(apart: Path, atoll: Call) -> None:
    said = atoll("sensitivity", apart, "--tokens", "64")
    assert all(block in said.out for block in BLOCKS)
    assert (apart / "sensitivity.png").read_bytes().startswith(b"\x89PNG")
    assert "sensitivity.png shows" in said.err


def test_with_everything_mixed_nothing_is_left(apart: Path, atoll: Call) -> None:
    selection = atoll("sensitivity", apart, "--tokens", "64", "--share", "1", "--json").json["selection"]
    assert sorted(selection["blocks"]) == sorted(BLOCKS)
    assert (selection["distances"][-1], selection["part"]) == (0, 1)


def test_no_more_tokens_are_read_than_are_held_out(apart: Path, text: Path, atoll: Call) -> None:
    held_out = load_corpus(f"text:{text}", bytes_tokenizer()).held_out.numel()
    found = atoll("sensitivity", apart, "--tokens", "100000", "--share", "0.1", "--json").json
    assert found["tokens"] == held_out // 17 * 16


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["data-parallel"], "are equal at step 6, so there is nothing to measure: a round has just closed"),
        (["diloco", "--period", "3"], "end a run inside of a round, such as with --steps 30 --period 20"),
        (["single"], "a run of one worker, which has nobody to differ from; give a run of two or more"),
    ],
)
def test_workers_that_do_not_differ_are_told_so(
    command: list[str], sentence: str, atoll: Call, small: list[str], tmp_path: Path
) -> None:
    assert atoll("train", *command, *small, "--out", tmp_path / "run").status == 0
    said = atoll("sensitivity", tmp_path / "run")
    assert (said.status, said.out, said.err.count("\n")) == (2, "", 1)
    assert sentence in said.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "takes one run directory and needs one; give the --out of an atoll train"),
        ("one two", "takes one run directory and was given 2"),
        ("nowhere", "nowhere holds no run (there is no config.json in it)"),
        ("nowhere --share 43", "--share was 43, but it is a part of the parameters; give at most 1"),
        ("nowhere --tokens 0", "--tokens was 0, which makes no sense"),
        ("nowhere --tokns 3", "atoll sensitivity has no option --tokns; did you mean --tokens?"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence_and_status_2(words: str, sentence: str, atoll: Call) -> None:
    said = atoll(f"sensitivity {words}")
    assert (said.status, said.out, said.err.count("\n")) == (2, "", 1)
    assert sentence in said.err


def test_a_share_below_the_smallest_block_is_refused_with_its_size(apart: Path, atoll: Call) -> None:
    said = atoll("sensitivity", apart, "--tokens", "16", "--share", "0.0001")
    assert said.status == 2
    assert "the smallest block, model.norm, has 0.00048 of them; give --share 0.00048 or more" in said.err


def changed(apart: Path, out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A run directory with the config of another, changed."""
    config = json.loads((apart / "config.json").read_text())
    change(config)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    (out / "checkpoints").symlink_to(apart / "checkpoints")


@pytest.mark.parametrize(
    ("change", "status", "sentence"),
    [
        (lambda config: config.update(data="0" * 16), 2, "so what is held out may have been trained on"),
        (lambda config: config.pop("run"), 1, "config.json cannot be read ('run'); give a run that this version"),
        (lambda config: config.update(run="Run("), 1, "config.json cannot be read"),
        (lambda config: config.update(run="print(3)"), 1, "config.json cannot be read ('data')"),
        (lambda config: config.update(run="[]"), 1, "[] where a value with its arguments belongs"),
        (
            lambda config: config.update(run=config["run"].replace("'tiny'", "'small'")),
            2,
            "was trained with a module of the caller's own",
        ),
    ],
)
def test_a_directory_that_is_not_as_its_run_left_it_is_told_so(
    change: Callable[[dict[str, Any]], None], status: int, sentence: str, apart: Path, atoll: Call, tmp_path: Path
) -> None:
    changed(apart, tmp_path / "run", change)
    said = atoll("sensitivity", tmp_path / "run")
    assert (said.status, said.out, said.err.count("\n")) == (status, "", 1)
    assert sentence in said.err


def test_a_run_without_a_checkpoint_is_told_so(apart: Path, atoll: Call, tmp_path: Path) -> None:
    changed(apart, tmp_path / "run", lambda config: None)
    (tmp_path / "run" / "checkpoints").unlink()
    said = atoll("sensitivity", tmp_path / "run")
    assert (said.status, said.out) == (1, "")
    assert "has no complete checkpoint yet" in said.err


def test_a_run_that_has_diverged_is_told_so(apart: Path, text: Path, atoll: Call, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--data", f"text:{text}", "--steps", "3", "--batch", "2", "--length", "16", "--lr", "1e30"]
    atoll("train", "local-sgd", "--period", "2", "--workers", "2", *options, "--out", out)
    said = atoll("sensitivity", out)
    assert said.status == 2
    assert "predict nan at step 3" in said.err


def test_a_run_of_ones_own_module_is_told_so(text: Path, atoll: Call, tmp_path: Path) -> None:
    run = Run(local_sgd(2), data=Data(f"text:{text}", batch=2, length=16), workers=2, steps=3, warmup=0)
    hub = Hub(2)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))

    train(run, [hub.group(0), hub.group(1)], out=tmp_path / "run", build=build, quiet=True)
    said = atoll("sensitivity", tmp_path / "run")
    assert said.status == 2
    assert "was trained with a module of the caller's own" in said.err


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ["wte.weight", "h.1.ln.weight", "h.1.mlp.weight", "h.10.ln.weight", "ln_f.weight", "ln_f.bias"],
            {"wte": ("wte.*",), "h.1": ("h.1.*",), "h.10": ("h.10.*",), "ln_f": ("ln_f.*",)},
        ),
        (["layers.0.experts.7.weight", "layers.0.gate.weight"], {"layers.0": ("layers.0.*",)}),
        (["body.position", "body.embed.weight", "scale"], {
            "body": ("body.position",), "body.embed": ("body.embed.*",), "scale": ("scale",),
        }),
        (["table.0", "table.1"], {"table.0": ("table.0",), "table.1": ("table.1",)}),
        (["a*.weight", "ab.weight"], {"a*": ("a[*].*",), "ab": ("ab.*",)}),
    ],
)  # fmt: skip
def test_blocks_are_modules_and_their_patterns_match_them_alone(
    names: list[str], expected: dict[str, tuple[str, ...]]
) -> None:
    blocks = blocks_of({name: torch.zeros(2, 3) for name in names})
    assert {block.name: block.patterns for block in blocks} == expected
    for block in blocks:
        assert [n for n in names if any(fnmatchcase(n, each) for each in block.patterns)] == list(block.names)
        assert (block.numel, block.nbytes) == (6 * len(block.names), 24 * len(block.names))


def test_help_shows_the_options(atoll: Call) -> None:
    said = atoll("sensitivity --help")
    assert said.status == 0
    assert all(flag in said.out for flag in ("DIR", "--tokens INT", "--share FLOAT", "--json"))
