"""The models that Atoll makes, loads and exports. Any other `nn.Module` that maps tokens to logits trains as well."""

import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from atoll.errors import CheckpointError, ModelError
from atoll.train.sizes import SIZES, Size, find_size, parameter_count

__all__ = [
    "SIZES",
    "Size",
    "build_model",
    "export_model",
    "load_pretrained",
    "meta_model",
    "next_token_loss",
    "parameter_count",
]

WEIGHTS = "model.safetensors"
"""The file of an exported model's weights."""


def build_model(size_name: str, *, vocab: int, length: int, seed: int) -> LlamaForCausalLM:
    """A model of a named size whose weights are a pure function of `seed`.

    Matrices are drawn from N(0, init_std²) in the module's own order, from a generator of their own; norms are 1. No
    other generator moves, so threads may build models at the same time.

    Args: size_name: one of `SIZES`. vocab: the tokenizer's vocabulary, in tokens; the model's may be larger. length:
    tokens per sequence. seed: of the weights.

    Raises: ModelError if there is no such size, or it has fewer tokens than the tokenizer.

    Example:
        >>> build_model("tiny", vocab=256, length=128, seed=0).num_parameters()
        133440
    """
    size = find_size(size_name)
    model = meta_model(size_name, vocab=vocab, length=length)
    model.to_empty(device="cpu")
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its tables are buffers, made on meta too
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.empty(parameter.shape).normal_(0, size.init_std, generator=generator))
            else:
                parameter.fill_(1)
    return model


def meta_model(size_name: str, *, vocab: int, length: int) -> LlamaForCausalLM:
    """A model of a named size without weights, on the meta device: for plans, and to be filled.

    Nothing is drawn or allocated; the library's own initialisation would draw from the global generator.

    Raises: ModelError if there is no such size, or it has fewer tokens than the tokenizer.
    """
    size = find_size(size_name)
    if size.vocab is not None and size.vocab < vocab:
        free = ", ".join(name for name, other in SIZES.items() if other.vocab is None)
        raise ModelError(
            f"the model size {size_name} has a vocabulary of {size.vocab} tokens, but the tokenizer's is {vocab}; "
            f"give a smaller tokenizer, or a size that takes the tokenizer's: {free}"
        )
    with torch.device("meta"):
        return LlamaForCausalLM(_config(size, size.vocab or vocab, length))


def _config(size: Size, vocab: int, length: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=size.d_model,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=length,
        initializer_range=size.init_std,
        rms_norm_eps=1e-5,
        tie_word_embeddings=size.tied,
        use_cache=False,
        # The defaults name tokens 1 and 2, which are ordinary ones in another tokenizer, such as bytes.
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]  # taken, and documented, but not in the signature
    )


def load_pretrained(path_or_hub_name: str, *, vocab: int, length: int) -> PreTrainedModel:
    """A causal language model that transformers can load, in fp32 and ready to train.

    Args: path_or_hub_name: a folder, or a model on the Hugging Face hub. vocab: the tokenizer's vocabulary, in tokens.
    length: tokens per sequence.

    Raises: ModelError if the folder is missing or holds no model, if the hub does not answer or does not know the
    name, if the tokenizer has more tokens than the model, or sequences more than it has positions.
    """
    folder = Path(path_or_hub_name).expanduser()
    local = folder.exists()
    if not local and (path_or_hub_name[:1] in {"/", ".", "~"} or path_or_hub_name.count("/") > 1):
        raise ModelError(f"there is no pretrained model at {path_or_hub_name}; give an existing folder, or a hub name")
    where = str(folder) if local else path_or_hub_name
    try:
        config = AutoConfig.from_pretrained(where, local_files_only=local)
        _check_fit(path_or_hub_name, config.get_text_config(), vocab, length)
        with _without_bars():
            model, found = cast(Any, AutoModelForCausalLM).from_pretrained(
                where, config=config, dtype=torch.float32, local_files_only=local, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = (str(error) or type(error).__name__).strip().splitlines()[0].rstrip(".")
        if local:
            message = f"the folder {folder} holds no causal language model that transformers can load ({reason})"
            raise ModelError(f"{message}; give a folder written by save_pretrained, or a hub name") from error
        message = f"the pretrained model {path_or_hub_name} is no folder here, and the hub did not give it ({reason})"
        raise ModelError(f"{message}; check the name and the connection, or give a folder") from error
    if found["missing_keys"]:
        # transformers fills these at random, which would differ from worker to worker.
        missing = ", ".join(sorted(found["missing_keys"])[:3])
        raise ModelError(f"the pretrained model {path_or_hub_name} lacks weights ({missing}); give a complete one")
    model.config.use_cache = False
    return model.train()


def _check_fit(name: str, config: Any, vocab: int, length: int) -> None:
    if config.vocab_size < vocab:
        raise ModelError(
            f"the pretrained model {name} knows {config.vocab_size} tokens, but the tokenizer has {vocab}; "
            "give the model's own tokenizer"
        )
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < length:
        raise ModelError(
            f"sequences of {length} tokens were asked for, but the pretrained model {name} has {positions} positions; "
            f"give a length of at most {positions}"
        )


def export_model(model: nn.Module, directory: Path) -> None:
    """Write safetensors and config so that `AutoModelForCausalLM.from_pretrained(directory)` gives the same model.

    Of a module that is not transformers' only the weights are written, for `safetensors.torch.load_model`.

    All of it is written into a folder beside and renamed last, so `directory` holds a whole model or does not exist. An
    earlier export there is replaced. Tied weights are written once.

    Raises: ModelError if `directory` holds something else; CheckpointError if it cannot be written.
    """
    if directory.exists() and not _replaceable(directory):
        raise ModelError(f"{directory} was to hold the exported model, but holds something else; give another name")
    fresh = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        if isinstance(model, PreTrainedModel):
            with _without_bars():
                model.save_pretrained(fresh / "new")
        else:
            (fresh / "new").mkdir()
            save_model(model, str(fresh / "new" / WEIGHTS))
        if directory.exists():
            directory.rename(fresh / "old")
        (fresh / "new").rename(directory)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the model could not be written to {directory} ({error}); free some space or give another folder"
        ) from error
    finally:
        if fresh is not None:
            if (fresh / "old").exists() and not directory.exists():
                (fresh / "old").rename(directory)
            shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def _without_bars() -> Generator[None]:
    """A model of ours is written in a moment; the library's progress bars would only tear a terminal that has its
    own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _replaceable(directory: Path) -> bool:
    return directory.is_dir() and ((directory / WEIGHTS).exists() or not any(directory.iterdir()))


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of each next token, in nats per token: a scalar in fp32, or in the logits' own wider dtype.

    Args: model: maps [batch, length] tokens to logits [batch, length, vocab], or to an object with `.logits`.
    tokens: int64 [batch, length + 1]; the last is only predicted, the first only read.

    Example:
        >>> model = build_model("tiny", vocab=256, length=8, seed=0)
        >>> next_token_loss(model, torch.zeros(2, 9, dtype=torch.long)).shape
        torch.Size([])
    """
    # Passing labels instead would make the model copy and pad what this only views.
    answer = model(tokens[:, :-1])
    logits: Tensor = getattr(answer, "logits", answer)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(wide.flatten(0, 1), tokens[:, 1:].flatten())
