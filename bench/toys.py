"""A model that is only its parameters, with the names and shapes of a Llama-shaped transformer."""

import torch
from torch import nn


def transformer(width: int, layers: int, vocab: int) -> nn.Module:
    """Nine tensors per layer (12.1 width^2 elements, nearly) and an embedding; all of one small value each."""
    hidden = -(-8 * width // 3 // 32) * 32
    square, up, down = (width, width), (hidden, width), (width, hidden)
    layer = {"input_norm": (width,), "q_proj": square, "k_proj": square, "v_proj": square, "o_proj": square}
    layer |= {"post_norm": (width,), "gate_proj": up, "up_proj": up, "down_proj": down}
    model = nn.Module()
    model.register_parameter("embed_tokens", nn.Parameter(torch.full((vocab, width), 0.02)))
    blocks = nn.ModuleList(nn.Module() for _ in range(layers))
    model.add_module("layers", blocks)
    for block in blocks:
        for name, shape in layer.items():
            block.register_parameter(name, nn.Parameter(torch.full(shape, 0.02)))
    return model


def size(model: nn.Module) -> int:
    """Elements in all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
