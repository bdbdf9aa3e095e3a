"""What do codecs cost?

25 M fp32 elements are encoded and decoded chunk by chunk, in one thread, beside one copy of the same tensor in the same
turn: a codec that costs more than the link saves is of no use. If hivemind can be imported, its 8-bit compressions get
the same chunks in the same turns (it is no dependency; install it into an environment of its own). The scratch is
measured as in `bench.memory`, in a fresh process, with the wires thrown away.
"""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from atoll.parts.codecs import (
    cast,
    error_feedback,
    float4,
    linear,
    prune_by_sign,
    quantise,
    random_mask,
    statistical,
    topk,
)
from atoll.trees import CHUNK, Layout, Spec, cut
from atoll.wire import Codec
from bench import memory
from bench.measure import Figure, in_turns, ratios

SPARSE = topk(64, then=quantise(2, block=64, by=statistical()))
CODECS: dict[str, Codec] = {
    "cast(float16)": cast(torch.float16),
    "float4": float4(),
    **{f"quantise({bits}, {by})": quantise(bits, by=by) for by in (linear(), statistical()) for bits in (8, 4, 2)},
    "topk(64)": topk(64),
    "topk(64), 2 bit": SPARSE,
    "error_feedback(topk(64), 2 bit)": error_feedback(SPARSE, 0.95),
    "prune_by_sign(0.5)": prune_by_sign(0.5),
    "random_mask(0.005)": random_mask(0.005, seed=0),
}
ENCODE, DECODE = 6.0, 3.0
"""Copies, for 8 bits."""
SCRATCH = 16.0
"""Chunks."""
FASTER = 3.0
"""Times hivemind."""
OURS = quantise(8)


class Coded:
    """A tensor and what a codec makes of it."""

    def __init__(self, codec: Codec, values: Tensor) -> None:
        self.codec = codec
        self.values = values
        self.layout = Layout.of([Spec("values", tuple(values.shape), (1,), values.dtype)])
        self.state = codec.init(self.layout)
        self.wires: dict[int, Tensor] = {}

    def encode(self) -> None:
        for start, stop in self.layout.chunks:
            self.wires[start] = self.codec.encode(self.values[start:stop], cut(self.state, start, stop))

    def decode(self) -> None:
        for start, stop in self.layout.chunks:
            self.codec.decode(self.wires[start], self.values[start:stop])

    def both(self) -> None:
        for start, stop in self.layout.chunks:
            values = self.values[start:stop]
            self.codec.decode(self.codec.encode(values, cut(self.state, start, stop)), values)


def figures(numel: int = 25_000_000, turns: int = 7, names: Sequence[str] = tuple(CODECS)) -> Iterator[Figure]:
    """Copies to encode and to decode, hivemind's time in ours, and chunks of scratch."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(values)
    _settle()
    try:
        for name in names:
            coded = Coded(CODECS[name], values)
            actions = [lambda: target.copy_(values), coded.encode, coded.decode]
            copy, encode, decode = (seconds[1:] for seconds in in_turns(actions, turns + 1))
            eight = name.startswith("quantise(8")
            yield Figure(f"{name}, encode", ratios(encode, copy), "copies", most=ENCODE if eight else None)
            yield Figure(f"{name}, decode", ratios(decode, copy), "copies", most=DECODE if eight else None)
        yield from _beside_hivemind(values, turns)
    finally:
        torch.set_num_threads(threads_before)
    for name in names:
        yield Figure(f"{name}, scratch", [_scratch(name, numel)], "chunks", most=SCRATCH)


def _settle() -> None:
    """Let the C library keep freed memory of up to 32 MiB, as it does in any process that has trained a step: otherwise
    it gives back the scratch of each chunk, and what is measured is page faults."""
    torch.empty(31 * memory.MIB, dtype=torch.uint8)


def _beside_hivemind(values: Tensor, turns: int) -> Iterator[Figure]:
    rivals = _hivemind(values)
    ours = [Coded(codec, values).both for codec in (OURS, quantise(8, by=statistical()))]
    linear_, statistical_, *theirs = (seconds[1:] for seconds in in_turns([*ours, *rivals.values()], turns + 1))
    left_out = "" if theirs else "; hivemind cannot be imported here and was left out"
    yield Figure("quantise(8), there and back", [1e3 * taken for taken in linear_], f"ms{left_out}")
    for name, seconds in zip(rivals, theirs, strict=True):
        yield Figure(f"{name}, there and back", ratios(seconds, linear_), "times quantise(8)", least=FASTER)
        yield Figure(f"{name}, there and back", ratios(seconds, statistical_), "times quantise(8, statistical())")


def _hivemind(values: Tensor) -> dict[str, Callable[[], None]]:
    """Its compressions of 8 bits, those that work here."""
    os.environ["QUANTIZATION_THREADS"] = "1"
    try:
        from hivemind import compression
    except ImportError:
        return {}
    each: list[compression.CompressionBase] = [
        compression.Uniform8BitQuantization(),
        compression.Quantile8BitQuantization(),
    ]
    if find_spec("bitsandbytes"):
        each.append(compression.BlockwiseQuantization())
    chunks = values.split(CHUNK)

    def action(codec: compression.CompressionBase) -> Callable[[], None]:
        def both() -> None:
            for chunk in chunks:
                codec.extract(codec.compress(chunk, compression.CompressionInfo.from_tensor(chunk)))

        return both

    return {type(codec).__name__: action(codec) for codec in each}


def _scratch(name: str, numel: int) -> float:
    command = [sys.executable, "-m", "bench.codecs", name, str(numel)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def child(name: str, numel: int) -> float:
    """By how many chunks this process grows while everything is encoded and decoded."""
    torch.set_num_threads(1)
    coded = Coded(CODECS[name], torch.randn(numel))
    for state in coded.state.values():
        state.fill_(0)  # all of its memory is there before it is measured
    Coded(CODECS[name], coded.values[:4096]).both()  # loads all code
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory._resident("VmRSS")
    coded.both()
    return (memory._resident("VmHWM") - before) / (CHUNK * coded.values.itemsize)


if __name__ == "__main__":
    print(json.dumps(child(sys.argv[1], int(sys.argv[2]))))
