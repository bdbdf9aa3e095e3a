"""Codecs: how values are written on the wire. Wire bytes are real: `len(encode(values)) == nbytes(len(values),
itemsize)`."""

from atoll.parts.codecs.plain import cast, exact

__all__ = ["cast", "exact"]
