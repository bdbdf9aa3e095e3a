"""The text of a run as its workers read it: shards, and what is held out."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.train.blocks import Shard
from atoll.train.corpus import load_corpus
from atoll.train.run import Run
from atoll.train.shards import held_out_batches, make_shards
from atoll.train.tokens import bytes_tokenizer, hub_tokenizer

EVALUATED = 8
"""Held-out batches per evaluation, at most, of `ROWS` sequences: the same text whatever the training batch."""
ROWS = 16


@dataclass(frozen=True)
class Material:
    """Args: fingerprint: of text and tokenizer. vocab: tokens. shards: by worker; held_out: batches, on the run's
    device."""

    fingerprint: str
    vocab: int
    shards: Sequence[Shard]
    held_out: Sequence[Tensor]

    @classmethod
    def of(cls, run: Run) -> "Material":
        """What a run reads. Raises: DataError."""
        data = run.data
        tokenizer = bytes_tokenizer() if data.tokenizer == "bytes" else hub_tokenizer(data.tokenizer)
        corpus = load_corpus(data.source, tokenizer)
        shards = make_shards(
            corpus, data.sharding, workers=run.workers, batch=data.batch, length=data.length, seed=run.seed
        )
        batches = held_out_batches(corpus, batch=ROWS, length=data.length, most=EVALUATED)
        return cls(corpus.fingerprint, corpus.vocab, shards, [batch.to(run.device) for batch in batches])

    def share(self, worker: int) -> float:
        """A worker's part of all the data, 1 on average."""
        return self.shards[worker].size / (sum(shard.size for shard in self.shards) / len(self.shards))
