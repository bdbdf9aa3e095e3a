"""Sharding: which worker gets which part of a corpus."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atoll.errors import DataError
from atoll.train.blocks import Blocks, BlockShard, Shard, joint, random
from atoll.train.corpus import Corpus
from atoll.train.stream import Stream, StreamShard

__all__ = ["Portion", "Shard", "Sharding", "by_domain", "held_out_batches", "iid", "joint", "make_shards"]


@dataclass(frozen=True)
class Portion:
    """What one worker gets: the blocks of these numbers; `name` is what errors call it."""

    blocks: Blocks
    numbers: NDArray[np.int64]
    name: str


class Sharding(Protocol):
    """How workers share a corpus."""

    def portions(self, corpus: Corpus, *, workers: int, width: int, seed: int) -> Sequence[Portion]:
        """One portion per worker, disjoint, in blocks of `width` tokens; a pure function of the arguments."""
        ...


@dataclass(frozen=True)
class iid:
    """Blocks of all domains at random: worker m of k gets the m-th part of a permutation that the seed decides.

    The domains are cut in a row, so a block may hold the end of one and the beginning of the next. All parts are of one
    size, so all workers weigh the same; fewer than k blocks are left over, and nobody uses them. Of a stream, worker m
    gets every k-th document from the m-th, whatever the seed.
    """

    def portions(self, corpus: Corpus, *, workers: int, width: int, seed: int) -> Sequence[Portion]:
        """As `Sharding` says."""
        blocks = Blocks(list(corpus.domains.values()), width)
        each = blocks.count // workers
        shuffled = random(seed).permutation(blocks.count)
        return [Portion(blocks, shuffled[m * each : (m + 1) * each], corpus.name) for m in range(workers)]


@dataclass(frozen=True)
class by_domain:
    """Whole domains, so that workers see different text (non-iid): from the largest on, each to the lightest worker.

    The seed has no say in who gets what. A worker's domains are cut in a row; the tokens at their end that fill no
    block are left over, and nobody uses them.

    Raises: DataError when there are fewer domains than workers.
    """

    def portions(self, corpus: Corpus, *, workers: int, width: int, seed: int) -> Sequence[Portion]:
        """As `Sharding` says."""
        domains = {domain: tokens for domain, tokens in corpus.domains.items() if tokens.numel()}
        if len(domains) < workers:
            raise DataError(
                f"{workers} workers were to get whole domains of {corpus.name}, but it has only {len(domains)} "
                f"({', '.join(domains)}); lower --workers to at most {len(domains)}, or share the data iid"
            )
        mine: list[list[str]] = [[] for _ in range(workers)]
        loads = [0] * workers
        for domain in sorted(domains, key=lambda domain: (-domains[domain].numel(), domain)):
            lightest = min(range(workers), key=loads.__getitem__)
            mine[lightest].append(domain)
            loads[lightest] += domains[domain].numel()
        portions: list[Portion] = []
        for names in mine:
            blocks = Blocks([domains[domain] for domain in names], width)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            portions.append(Portion(blocks, np.arange(blocks.count), ", ".join(names[:3]) + more))
        return portions


def make_shards(
    corpus: Corpus | Stream, how: Sharding, *, workers: int, batch: int, length: int, seed: int
) -> tuple[Shard, ...]:
    """The shards of all workers, by number m; shard m is a pure function of the corpus, `how`, seed, m and workers.

    Blocks are of length + 1 tokens and do not overlap, so a token is in at most one. A shard holds block numbers, no
    copies of tokens.

    Args: how: `iid()` or `by_domain()`. workers: k. batch: rows per batch; length: predicted tokens per row. seed: of
        shares and orders.
    Raises: DataError when a worker's part does not fill one batch, or a stream was to be shared otherwise than iid.

    Example:
        >>> from atoll.train.corpus import load_corpus
        >>> from atoll.train.tokens import bytes_tokenizer
        >>> corpus = load_corpus("builtin", bytes_tokenizer())
        >>> shards = make_shards(corpus, iid(), workers=4, batch=2, length=16, seed=0)
        >>> shards[3].next_batch().shape
        torch.Size([2, 17])
    """
    for name, value, least in (("workers", workers, 1), ("batch", batch, 1), ("length", length, 1), ("seed", seed, 0)):
        if value < least:
            raise DataError(f"--{name} was {value}, but must be at least {least}; give --{name} {least} or more")
    if isinstance(corpus, Stream):
        if how != iid():
            raise DataError(
                f"{corpus.name} was to be shared by {how}, but a stream has no domains; share it iid, or use text:PATH"
            )
        return tuple(StreamShard(corpus, worker=m, workers=workers, batch=batch, length=length) for m in range(workers))
    portions = how.portions(corpus, workers=workers, width=length + 1, seed=seed)
    for m, portion in enumerate(portions):
        if portion.numbers.size < batch:
            raise DataError(
                f"{workers} workers with batches of {batch} x {length + 1} tokens need "
                f"{workers * batch * (length + 1)} training tokens, but {corpus.name} has {corpus.tokens} and worker "
                f"{m} would get only {portion.numbers.size} of {batch} blocks (from {portion.name}); "
                "lower --workers, --batch or --length, or use more data"
            )
    return tuple(
        BlockShard(portion.blocks, portion.numbers, batch=batch, seed=seed, worker=m)
        for m, portion in enumerate(portions)
    )


def held_out_batches(corpus: Corpus | Stream, *, batch: int, length: int, most: int) -> list[Tensor]:
    """Batches of held-out tokens, int64 [at most batch, length + 1], the same at every call.

    Rows do not overlap. Where there are more than most * batch, that many are taken evenly from all over. The last
    batch may have fewer rows, and where not even one row is full there is one batch [1, held-out tokens]: average
    losses by token, not by batch.

    Args: batch: rows; length: predicted tokens per row; most: batches.
    Raises: DataError when fewer than two tokens are held out.
    """
    tokens = corpus.held_out
    if tokens.numel() < 2:
        raise DataError(
            f"a loss on held-out text needs at least 2 tokens, but {corpus.name} is so small that {tokens.numel()} are "
            "held out; use more data"
        )
    blocks = Blocks([tokens], min(length + 1, tokens.numel()))
    count = min(blocks.count, most * batch)
    numbers = np.arange(count) * blocks.count // count
    return [blocks.rows(numbers[first : first + batch]) for first in range(0, count, batch)]
