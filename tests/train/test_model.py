"""Are the models the published ones, decided by their seed, and the same after a trip through a folder?"""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from atoll.errors import CheckpointError, ModelError
from atoll.train.model import SIZES, build_model, export_model, load_pretrained, next_token_loss, parameter_count


def tiny(seed: int = 0, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    model = build_model("tiny", vocab=256, length=16, seed=seed)
    for parameter in model.parameters():  # not model.to: the rotary tables stay in fp32, as the library loads them
        parameter.data = parameter.data.to(dtype)
    return model


def tokens(rows: int = 2, length: int = 16) -> Tensor:
    return torch.randint(0, 256, (rows, length + 1), generator=torch.Generator().manual_seed(5))


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("name", SIZES)
def test_the_closed_formula_counts_the_module_of_every_size(name: str) -> None:
    size = SIZES[name]
    vocab = size.vocab or 300
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=size.d_model,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        tie_word_embeddings=size.tied,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert parameter_count(size, vocab) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_a_built_model_has_the_parameters_that_are_counted(name: str) -> None:
    model = build_model(name, vocab=300, length=16, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(SIZES[name], 300)


@pytest.mark.parametrize(
    ("name", "published"),
    [("opendiloco-1b", 1_100_048_384), ("factored-gossip-1.5b", 1_498_482_688)],
)
def test_sizes_with_a_published_count_have_it_exactly(name: str, published: int) -> None:
    assert parameter_count(SIZES[name], 256) == published


@pytest.mark.parametrize(("name", "layers", "d", "inside"), [
    ("diloco-60m", 3, 896, 1024), ("diloco-150m", 12, 896, 1024), ("diloco-400m", 12, 1536, 1536)
])  # fmt: skip
def test_diloco_sizes_count_as_its_plain_transformer_does(name: str, layers: int, d: int, inside: int) -> None:
    """Chinchilla's block: four matrices [d, heads x head_dim], two of a feed-forward of 4 d; one token table."""
    plain = 32_000 * d + layers * (4 * d * inside + 2 * d * 4 * d)
    assert parameter_count(SIZES[name], 256) == pytest.approx(plain, rel=0.005)
    assert parameter_count(SIZES[name], 256) == pytest.approx(float(name[7:-1]) * 1e6, rel=0.03)


def test_opendiloco_150m_is_named_after_its_blocks() -> None:
    size = SIZES["opendiloco-150m"]
    assert parameter_count(size, 256) - 2 * 32_000 * 1024 == pytest.approx(150e6, rel=0.01)


def test_a_seed_decides_the_weights_and_another_seed_others() -> None:
    for mine, same, other in zip(weights(tiny(3)), weights(tiny(3)), weights(tiny(4)), strict=True):
        assert torch.equal(mine, same)
        assert mine.ndim == 1 or not torch.equal(mine, other)


def test_weights_have_the_deviation_of_the_size_and_norms_are_one() -> None:
    model = build_model("small", vocab=256, length=16, seed=0)
    for parameter in weights(model):
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:  # the deviation of n draws is off by a share of about 1/sqrt(2n), here at most 0.6 %
            assert float(parameter.std()) == pytest.approx(SIZES["small"].init_std, rel=0.03)
            assert abs(float(parameter.mean())) < 0.02 * SIZES["small"].init_std * 3


def test_building_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    tiny()
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_may_build_models_at_the_same_time() -> None:
    alone = [weights(tiny(seed)) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        together = [weights(model) for model in pool.map(tiny, range(6))]
    for one, other in zip(alone, together, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_built_model_computes_what_the_library_makes_of_its_weights(tmp_path: Path) -> None:
    """Also that the rotary tables, which no checkpoint holds, survived being built on meta."""
    model = tiny()
    plain = LlamaForCausalLM(model.config)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(tokens()).logits, plain(tokens()).logits, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exported_model_gives_the_same_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny(dtype=dtype)
    export_model(model, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == dtype
    torch.testing.assert_close(loaded(tokens()).logits, model(tokens()).logits, rtol=0, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def tied(seed: int = 0) -> LlamaForCausalLM:
    config = tiny().config
    config.tie_word_embeddings = True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def test_tied_weights_are_exported_once_and_come_back_tied(tmp_path: Path) -> None:
    model = tied()
    export_model(model, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").stat().st_size < 4 * (parameter_count(SIZES["tiny"], 256) - 8000)
    loaded = load_pretrained(str(tmp_path / "model"), vocab=256, length=16)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    torch.testing.assert_close(loaded(tokens()).logits, model(tokens()).logits, rtol=0, atol=0)


def test_parameters_that_are_views_of_one_buffer_are_exported_whole(tmp_path: Path) -> None:
    model = tiny()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    export_model(model, tmp_path / "model")
    loaded = load_pretrained(str(tmp_path / "model"), vocab=256, length=16)
    assert all(map(torch.equal, weights(loaded), weights(tiny())))


def test_an_export_replaces_an_earlier_one(tmp_path: Path) -> None:
    for seed in (0, 1):
        export_model(tiny(seed), tmp_path / "model")
    loaded = load_pretrained(str(tmp_path / "model"), vocab=256, length=16)
    assert all(map(torch.equal, weights(loaded), weights(tiny(1))))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("earlier", [False, True])
def test_an_export_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    if earlier:
        export_model(tiny(0), tmp_path / "model")

    def full_disk(self: LlamaForCausalLM, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full_disk)
    with pytest.raises(CheckpointError, match="No space left on device"):
        export_model(tiny(1), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if earlier else [])
    if earlier:
        loaded = load_pretrained(str(tmp_path / "model"), vocab=256, length=16)
        assert all(map(torch.equal, weights(loaded), weights(tiny(0))))


def test_an_export_touches_no_folder_of_other_things(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ModelError, match="holds something else"):
        export_model(tiny(), tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_of_a_module_that_is_not_of_transformers_the_weights_are_exported(tmp_path: Path) -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for _ in range(2):  # the second replaces the first
        export_model(module, tmp_path / "model")
    load_model(other, tmp_path / "model" / "model.safetensors")
    assert torch.equal(other.weight, module.weight)


def test_a_pretrained_start_trains_in_fp32_and_draws_nothing_from_the_global_generator(tmp_path: Path) -> None:
    export_model(tiny(dtype=torch.bfloat16), tmp_path / "model")
    before = torch.get_rng_state()
    model = load_pretrained(str(tmp_path / "model"), vocab=256, length=16)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert model.dtype == torch.float32


def test_another_architecture_is_a_pretrained_start(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=256, n_positions=16, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "model")
    loaded = load_pretrained(str(tmp_path / "model"), vocab=256, length=16).eval()
    torch.testing.assert_close(next_token_loss(loaded, tokens()), next_token_loss(model, tokens()), rtol=0, atol=0)


def test_a_pretrained_start_that_does_not_fit_is_refused_in_words(tmp_path: Path) -> None:
    export_model(tiny(), tmp_path / "model")
    name = str(tmp_path / "model")
    with pytest.raises(ModelError, match="knows 256 tokens, but the tokenizer has 257"):
        load_pretrained(name, vocab=257, length=16)
    with pytest.raises(ModelError, match="length of at most 16"):
        load_pretrained(name, vocab=256, length=17)


def test_a_pretrained_start_without_all_its_weights_is_refused(tmp_path: Path) -> None:
    tiny().model.save_pretrained(tmp_path / "headless")
    with pytest.raises(ModelError, match="lm_head"):
        load_pretrained(str(tmp_path / "headless"), vocab=256, length=16)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no causal language model"):
        load_pretrained(str(tmp_path), vocab=256, length=16)
    export_model(tiny(), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(ModelError, match="no causal language model"):
        load_pretrained(str(tmp_path / "model"), vocab=256, length=16)


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "runs/one/model"])
def test_a_missing_path_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="there is no pretrained model at"):
        load_pretrained(name, vocab=256, length=16)


def test_a_hub_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    def no_answer(name: str, **_: object) -> None:
        raise OSError("We couldn't connect to the hub.\nTry again.")

    monkeypatch.setattr(AutoConfig, "from_pretrained", no_answer)
    with pytest.raises(ModelError, match="the hub did not give it") as caught:
        load_pretrained("someone/something", vocab=256, length=16)
    assert "\n" not in str(caught.value)


def test_an_unknown_size_names_the_nearest_and_lists_the_others() -> None:
    with pytest.raises(ModelError, match="did you mean 'diloco-150m'") as caught:
        build_model("diloco150m", vocab=256, length=16, seed=0)
    assert all(name in str(caught.value) for name in SIZES)


def test_a_size_with_fewer_tokens_than_the_tokenizer_is_refused() -> None:
    with pytest.raises(ModelError, match="32000 tokens, but the tokenizer's is 50257"):
        build_model("diloco-60m", vocab=50_257, length=16, seed=0)


class Bare(nn.Module):
    """Logits that are the rows of a table: the loss is then known by hand."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def forward(self, read: Tensor) -> Tensor:
        return self.table[read]


def test_the_loss_is_the_mean_negative_log_likelihood_of_the_next_tokens() -> None:
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = [[0, 1, 2, 3], [4, 4, 0, 2]]
    expected = sum(-float(table[a].softmax(0)[b].log()) for row in rows for a, b in pairwise(row)) / 6
    assert float(next_token_loss(Bare(table), torch.tensor(rows))) == pytest.approx(expected, rel=1e-12)


def test_the_loss_equals_that_of_the_library_given_labels() -> None:
    model = tiny()
    ours = next_token_loss(model, tokens())
    theirs = model(tokens(), labels=tokens()).loss  # reads one token more and predicts the same ones
    torch.testing.assert_close(ours, theirs)


def test_narrow_logits_are_summed_in_fp32() -> None:
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = torch.tensor([[0, 1, 2, 3], [4, 4, 0, 2]])
    loss = next_token_loss(Bare(table), rows)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, next_token_loss(Bare(table.float()), rows), rtol=0, atol=0)
