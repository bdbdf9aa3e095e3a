"""What codecs that leave out values, and send the others by another codec, have in common."""

import torch
from torch import Tensor

from atoll.errors import CompositionError
from atoll.parts.codecs.blocks import aligned
from atoll.trees import Layout
from atoll.wire import Codec


def remembers(codec: Codec) -> bool:
    """Whether a codec carries something from round to round."""
    return bool(codec.init(Layout((), torch.float32)))


def check_then(what: object, then: Codec, kept: int) -> None:
    """Refuse a codec for the `kept` values of each block that could not be cut where the blocks are."""
    if remembers(then):
        raise CompositionError(
            f"{what!r} keeps other elements in each round, so {then!r} would take the error of one for that of "
            "another; write error_feedback(...) around the whole"
        )
    if kept % then.block:
        raise CompositionError(
            f"{what!r} keeps {kept} values of each block, which {then!r} does not cut into whole blocks of "
            f"{then.block}; keep a multiple of that, or give it a block that divides {kept}"
        )


def read_kept(then: Codec, part: Tensor, count: int, like: Tensor) -> Tensor:
    """`count` values of each row, in one dimension and of the dtype of `like`, from the part of each row that holds
    them."""
    values = then.decode(aligned(part).view(-1), like.new_empty(len(part) * count))
    return values.to(like.dtype)
