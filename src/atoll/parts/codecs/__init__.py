"""Codecs: how values are written on the wire. Wire bytes are real: `len(encode(values)) == nbytes(len(values),
itemsize)`."""

from atoll.parts.codecs.feedback import error_feedback
from atoll.parts.codecs.masks import prune_by_sign, random_mask
from atoll.parts.codecs.narrow import float4
from atoll.parts.codecs.plain import cast, exact
from atoll.parts.codecs.quantised import linear, quantise, statistical
from atoll.parts.codecs.sparse import topk

__all__ = [
    "cast",
    "error_feedback",
    "exact",
    "float4",
    "linear",
    "prune_by_sign",
    "quantise",
    "random_mask",
    "statistical",
    "topk",
]
