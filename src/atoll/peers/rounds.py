"""What every group does alike: headers, which contributions count, and the sum of one chunk in worker order."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from atoll.trees import CHUNK, Layout, cut
from atoll.wire import Codec, Keep, Key, Landed, Lost, Post, Reduce, Sum

ABSURD = 10.0
"""A contribution whose norm is this many times the median of the round is refused, if at least `ENOUGH` take part."""
ENOUGH = 4


@dataclass(frozen=True)
class Header:
    """What goes ahead of a contribution: its weight, its L2 norm (nan or inf if any value is not finite), and the
    worker's signals."""

    weight: float
    norm: float
    signals: Mapping[str, float]


def header_of(post: Post) -> Header:
    """Measure a contribution: one pass over its source, chunk by chunk."""
    layout = post.source.layout
    scratch = torch.empty(min(CHUNK, layout.numel), dtype=layout.dtype)
    norms = [
        torch.linalg.vector_norm(post.source.read(start, scratch[: stop - start])).item()
        for start, stop in layout.chunks
    ]
    return Header(post.weight, math.sqrt(sum(norm * norm for norm in norms)), post.signals)


def admit(key: Key, workers: Sequence[int], headers: Sequence[Header], quorum: float) -> Landed | Lost:
    """Which contributions count, decided alike by everyone from the same headers, before any value is used.

    Each is taken or refused whole: refused if it is not finite, or, among four or more, if its norm is ten times the
    median.
    Returns: `Landed` without its mean yet, or `Lost` if the contributions that count do not exceed `quorum`.
    """
    finite = [header.norm for header in headers if math.isfinite(header.norm) and math.isfinite(header.weight)]
    limit = ABSURD * median(finite) if len(finite) >= ENOUGH else math.inf
    reasons: list[str] = []
    accepted: list[int] = []
    for worker, header in zip(workers, headers, strict=True):
        if not (math.isfinite(header.norm) and math.isfinite(header.weight)):
            reasons.append(f"worker {worker} sent values that are not finite")
        elif header.norm > limit > 0:
            reasons.append(
                f"worker {worker} sent a norm of {header.norm:.3g}, over {ABSURD:g} times the median "
                f"{limit / ABSURD:.3g}"
            )
        else:
            accepted.append(worker)
    by_worker = dict(zip(workers, headers, strict=True))
    share = len(accepted) / len(workers)
    if not share > quorum or not sum(by_worker[worker].weight for worker in accepted) > 0:
        why = f"{len(accepted)} of {len(workers)} contributions count, the quorum is more than {quorum:g} of them"
        return Lost(key, "; ".join([why, *reasons]))
    names = sorted({name for worker in accepted for name in by_worker[worker].signals})
    signals = {
        name: _mean([by_worker[worker].signals[name] for worker in accepted if name in by_worker[worker].signals])
        for name in names
    }
    return Landed(
        key,
        tuple(accepted),
        share,
        signals,
        tuple(by_worker[worker].norm for worker in accepted),
        refused=tuple(reasons),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def encode(post: Post, start: int, stop: int, scratch: Tensor) -> Tensor:
    """The wire of one chunk of a contribution."""
    return post.codec.encode(post.source.read(start, scratch[: stop - start]), cut(post.codec_state, start, stop))


def accumulate(total: Tensor | None, codec: Codec, wire: Tensor, weight: float, out: Tensor) -> Tensor:
    """Add one decoded wire to the running sum in `out`, in the parameters' own or wider dtype. Call in worker order."""
    values = codec.decode(wire, out)
    if total is None:
        out.copy_(values)
        return out if weight == 1.0 else out.mul_(weight)
    return total.add_(values if weight == 1.0 else values.to(total.dtype) * weight)


def finish(total: Tensor, weights: Sequence[float], fold: Keep | Reduce | Sum) -> Tensor:
    """One division; and with a `Reduce` to a narrow result, the rounding that everyone, the owner too, sees. May
    return new memory."""
    total.div_(sum(weights))
    return fold.result.encode(total, {}) if isinstance(fold, Reduce) else total


def check_alike(fingerprints: Mapping[int, str], me: int) -> str | None:
    """None if all fingerprints agree, else a sentence that shows both sides."""
    different = sorted(worker for worker, seen in fingerprints.items() if seen != fingerprints[me])
    if not different:
        return None
    return (
        f"worker {me} trains {fingerprints[me]} but worker {different[0]} trains {fingerprints[different[0]]}: "
        "strategy, model shape or starting "
        "weights differ; build every worker's model from the same seed or file, with the same method"
    )


def layouts_match(posts: Sequence[Post]) -> bool:
    """Whether all contributions to one exchange have the same elements."""
    first: Layout = posts[0].source.layout
    return all(post.source.layout.numel == first.numel and post.source.layout.dtype == first.dtype for post in posts)
