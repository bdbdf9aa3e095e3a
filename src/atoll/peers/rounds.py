"""What every group does alike: headers, which contributions count, and the sum of one chunk in worker order."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atoll.parts.codecs import exact
from atoll.trees import CHUNK, Layout, cut
from atoll.wire import ABSURD, Codec, Edges, Keep, Key, Landed, Lost, Post, Reduce, Sum, absurd


@dataclass(frozen=True)
class Header:
    """What goes ahead of a contribution: its weight, its L2 norm (nan or inf if any value is not finite), and the
    worker's signals."""

    weight: float
    norm: float
    signals: Mapping[str, float]


def header_of(post: Post) -> Header:
    """Measure a contribution as the others will see it, after its wire: one pass over its source, chunk by chunk.

    What would not be finite in the format of the result is not finite either: a mean of what fits, fits.
    """
    layout = post.source.layout
    scratch = torch.empty(min(CHUNK, layout.numel), dtype=layout.dtype)
    result = post.fold.result if isinstance(post.fold, Reduce) else None
    squares = 0.0
    for start, stop in layout.chunks:
        values = post.source.read(start, scratch[: stop - start])
        state = {name: tensor.clone() for name, tensor in cut(post.codec_state, start, stop).items()}
        seen = post.codec.decode(post.codec.encode(values, state), values)
        if result is not None and result not in (post.codec, exact()):
            returned = result.decode(result.encode(values, {}), values)
            if not math.isfinite(_norm(returned, layout.dtype)):
                return Header(post.weight, math.inf, post.signals)
        squares += _norm(seen, layout.dtype) ** 2
    return Header(post.weight, math.sqrt(squares), post.signals)


def _norm(values: Tensor, dtype: torch.dtype) -> float:
    """L2 norm, taken in the layout's dtype. At most 1e150, or infinite: no square of it overflows."""
    norm = torch.linalg.vector_norm(values, dtype=dtype).item()
    return norm if norm < 1e150 else math.inf * norm


def admit(
    key: Key, workers: Sequence[int], headers: Sequence[Header], quorum: float, dropped: Collection[int] = ()
) -> Landed | Lost:
    """Which contributions count, decided alike by everyone from the same headers, before any value is used.

    Each is taken or refused whole: refused if its values are not finite, if its weight is not a finite number from 0,
    or, among four or more, if its norm is over ten times the median. A signal that is not finite counts as not sent.
    `dropped` were not heard in time, and count for nothing.
    Returns: `Landed` without its mean yet, or `Lost` if the contributions that count do not exceed `quorum`, or weigh
    nothing.
    """
    finite = [header.norm for header in headers if math.isfinite(header.norm) and 0 <= header.weight < math.inf]
    limit = absurd(finite)
    reasons: list[str] = []
    accepted: list[int] = []
    for worker, header in zip(workers, headers, strict=True):
        if worker in dropped:
            continue
        if not math.isfinite(header.norm):
            reasons.append(f"worker {worker} sent values that are not finite")
        elif not 0 <= header.weight < math.inf:
            reasons.append(f"worker {worker} sent the weight {header.weight:g}, which is not a finite number from 0")
        elif header.norm > limit > 0:
            reasons.append(
                f"worker {worker} sent a norm of {header.norm:.3g}, over {ABSURD:g} times the median "
                f"{limit / ABSURD:.3g}"
            )
        else:
            accepted.append(worker)
    by_worker = dict(zip(workers, headers, strict=True))
    share = len(accepted) / len(workers)
    weights = tuple(by_worker[worker].weight for worker in accepted)
    if not share > quorum:
        unheard = [f"worker {worker} was not heard" for worker in workers if worker in dropped]
        why = f"{len(accepted)} of {len(workers)} contributions count, the quorum is more than {quorum:g} of them"
        return Lost(key, "; ".join([why, *unheard, *reasons]))
    if not sum(weights) > 0:
        return Lost(key, "; ".join([f"the weights of workers {tuple(accepted)} are all 0", *reasons]))
    sent: dict[str, list[float]] = defaultdict(list)
    for worker in accepted:
        for name, value in by_worker[worker].signals.items():
            if math.isfinite(value):
                sent[name].append(value)
    return Landed(
        key,
        tuple(accepted),
        share,
        {name: sum(values) / len(values) for name, values in sorted(sent.items())},
        tuple(by_worker[worker].norm for worker in accepted),
        weights,
        refused=tuple(reasons),
        dropped=tuple(worker for worker in workers if worker in dropped),
    )


def heard(landed: Landed, edges: Edges | None) -> Landed:
    """The same round as one member hears it."""
    if edges is None:
        return landed
    kept = [index for index, worker in enumerate(landed.peers) if worker in edges.hears]
    norms, weights = ([values[index] for index in kept] for values in (landed.norms, landed.weights))
    peers = tuple(landed.peers[index] for index in kept)
    return replace(landed, peers=peers, norms=tuple(norms), weights=tuple(weights))


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
