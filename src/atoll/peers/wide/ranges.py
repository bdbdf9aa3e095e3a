"""The numbers that records hold: within what a message has room for, and what a step can come to."""

from typing import Annotated

Worker = Annotated[int, range(1 << 31)]
Index = Annotated[int, range(1 << 32)]
Owner = Annotated[int, range(1 << 16)]
Load = Annotated[int, range(1, 1 << 16)]
Step = Annotated[int, range(1 << 53)]
