"""Strategies as values, and the flow that carries them out without I/O."""
