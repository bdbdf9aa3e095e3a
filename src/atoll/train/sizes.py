"""Named sizes of Llama-shaped models: small ones for a CPU, and those of the papers.

| name | parameters | from |
|---|---|---|
| tiny, small, medium | 0.13, 0.84, 4.1 M | ours, for a few CPU cores; the tokenizer's vocabulary (counted: 256 bytes) |
| diloco-60m, -150m, -400m | 59, 150, 389 M | DiLoCo's table; heads x head_dim is not d_model in the two smaller ones |
| opendiloco-150m | 215 M | OpenDiLoCo, whose "150M" leaves out embedding and head |
| opendiloco-1b | 1.10 B | OpenDiLoCo: the shape of TinyLlama |
| factored-gossip-1.5b | 1.50 B | Factored Gossip DiLoCo: the Llama 3 shape that fits its 43 % subset and 3 GB payload |
"""

from dataclasses import dataclass
from difflib import get_close_matches

from atoll.errors import ModelError


@dataclass(frozen=True)
class Size:
    """The shape of a Llama model: RMS norm, rotary positions, SiLU-gated feed-forward, no bias.

    Args:
        layers: transformer blocks. d_model: width of the residual stream. ffn: width inside of the feed-forward.
        heads: query heads. kv_heads: key and value heads, a divisor of `heads`. head_dim: width of one head.
        vocab: rows of the embedding; None takes the tokenizer's. tied: the head is the embedding.
        init_std: standard deviation of the initial weights.
    """

    layers: int
    d_model: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int | None = None
    tied: bool = False
    init_std: float = 0.02


# Ours start from a deviation of sqrt(2 / (5 d_model)), which is the others' 0.02 at d_model = 1000: at 64, 0.02 is too
# small (tiny on source text: 1.80 nats per byte after 770 steps, against 1.72; two seeds). Two layers are the fewest
# that can copy.
#
# DiLoCo's table gives no feed-forward width. Two matrices of Chinchilla's 4 d_model, and one table for embedding and
# head, do give 60, 150 and 400 M; the gated feed-forward has three matrices, so it gets 8/3 d_model, to a multiple of
# 32.
SIZES: dict[str, Size] = {
    "tiny": Size(layers=2, d_model=64, ffn=176, heads=2, kv_heads=2, head_dim=32, init_std=0.079),
    "small": Size(layers=4, d_model=128, ffn=336, heads=4, kv_heads=4, head_dim=32, init_std=0.056),
    "medium": Size(layers=5, d_model=256, ffn=688, heads=4, kv_heads=4, head_dim=64, init_std=0.040),
    "diloco-60m": Size(3, 896, 2400, 16, 16, 64, vocab=32_000, tied=True),
    "diloco-150m": Size(12, 896, 2400, 16, 16, 64, vocab=32_000, tied=True),
    "diloco-400m": Size(12, 1536, 4096, 12, 12, 128, vocab=32_000, tied=True),
    "opendiloco-150m": Size(12, 1024, 2688, 16, 16, 64, vocab=32_000),
    "opendiloco-1b": Size(22, 2048, 5632, 32, 4, 64, vocab=32_000),
    "factored-gossip-1.5b": Size(16, 2048, 8192, 32, 8, 64, vocab=128_256),
}


def find_size(name: str) -> Size:
    """The size of that name.

    Raises: ModelError that lists the names, the nearest first.
    """
    if name in SIZES:
        return SIZES[name]
    nearest = get_close_matches(name, SIZES, n=1, cutoff=0)[0]
    others = ", ".join(other for other in SIZES if other != nearest)
    raise ModelError(f"there is no model size {name!r}; did you mean {nearest!r}? The others are {others}")


def parameter_count(size: Size, vocab: int) -> int:
    """Parameters of a model of that size: V d (2, or 1 if tied) + L (2 d a + 2 d b + 3 d f + 2 d) + d.

    Here V is the size's vocabulary, or `vocab` where the size takes the tokenizer's; a = heads x head_dim and
    b = kv_heads x head_dim are the widths of queries and keys; the last terms are the norms.

    Args: size; vocab: the tokenizer's vocabulary, in tokens.

    Example:
        >>> parameter_count(SIZES["factored-gossip-1.5b"], vocab=128_256)
        1498482688
    """
    d = size.d_model
    tables = (size.vocab or vocab) * d * (1 if size.tied else 2)
    attention = 2 * d * size.head_dim * (size.heads + size.kv_heads)
    return tables + size.layers * (attention + 3 * d * size.ffn + 2 * d) + d
