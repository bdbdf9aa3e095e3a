"""Faults of a run as a value: what dies, freezes, slows down or is cut off and when, and which messages get lost.

A schedule can be written by hand, drawn from a seed, kept in a file, and replayed by a simulated and by a real run.
"""

from atoll.faults.kinds import Cut, Death, Fault, Freeze, Partition, Rejoin, Slowness
from atoll.faults.schedule import Faults

__all__ = ["Cut", "Death", "Fault", "Faults", "Freeze", "Partition", "Rejoin", "Slowness"]
