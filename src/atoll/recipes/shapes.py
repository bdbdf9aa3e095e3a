"""Models without weights: names, shapes and dtypes of a named size, for plans that train nothing."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from atoll.train.sizes import find_size


def meta_model(size_name: str, vocab: int) -> nn.Module:
    """The model of a named size on the meta device: nothing is allocated, whatever its size.

    Args: vocab: of the tokenizer, for sizes that take the tokenizer's.
    Raises: ModelError if there is no such size.

    Example:
        >>> sum(parameter.numel() for parameter in meta_model("factored-gossip-1.5b", vocab=256).parameters())
        1498482688
    """
    size = find_size(size_name)
    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=size.vocab or vocab,
                hidden_size=size.d_model,
                intermediate_size=size.ffn,
                num_hidden_layers=size.layers,
                num_attention_heads=size.heads,
                num_key_value_heads=size.kv_heads,
                head_dim=size.head_dim,
                tie_word_embeddings=size.tied,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
