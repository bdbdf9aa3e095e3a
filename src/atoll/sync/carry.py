"""What a message holds."""

from enum import Enum


class Carry(Enum):
    """What a message holds."""

    GRADIENT = "gradient"
    """the inner gradient, averaged before clipping: synchronous data parallelism"""
    DELTA = "delta"
    """the outer gradient, start - live"""
    LIVE = "live"
    """the live parameters themselves"""
    ANCHOR = "anchor"
    """the anchor, after the outer step: parameters are mixed"""
    BOTH = "both"
    """delta and anchor, side by side"""

    def __repr__(self) -> str:
        return f"Carry.{self.name}"
