"""Streams: data sets of the Hugging Face hub that are read and tokenised as they are needed."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.errors import AtollError, CheckpointError, DataError
from atoll.train.documents import Document, checked_text, no_field
from atoll.train.tokens import Tokenizer, first_line

HELD_OUT_DOCUMENTS = 256
"""The first documents of a stream are held out."""


@dataclass(frozen=True, eq=False)
class Opened:
    """A data set that can be read from its beginning any number of times.

    Args: name: of the data set. dataset: a `datasets.IterableDataset`, of which copies are read. field: holds the text.
    """

    name: str
    dataset: Any
    field: str

    @property
    def domain(self) -> str:
        """The last part of the name, so that peers that keep the same folder in different places agree."""
        return self.name.rpartition("/")[2]

    def copy(self) -> Any:
        """A data set with a position of its own."""
        return copy.deepcopy(self.dataset)

    def texts(self, dataset: Any) -> Iterator[str]:
        """The texts from the position of a copy on. Raises: DataError when reading stops halfway."""
        try:
            for record in dataset:
                yield checked_text(record[self.field], self.field, f"hf:{self.name}")
        except AtollError:
            raise
        # What the hub's client and the readers of file formats raise is of no common kind.
        except Exception as error:
            raise DataError(
                f"hf:{self.name} was being read, but that stopped ({first_line(error)}); "
                "check the connection and the data set, and resume"
            ) from error


@dataclass(frozen=True, eq=False)
class Stream:
    """A corpus that is not in memory; its length is unknown and it has no domains.

    Args:
        name: the source as it was asked for. tokenizer: for documents to come. opened: the data set.
        held_out: tokens [tokens] of the first 256 documents, at most 2^20.
        fingerprint: as `Corpus` has it, but of the first 256 documents only.
    """

    name: str
    tokenizer: Tokenizer
    opened: Opened
    held_out: Tensor
    fingerprint: str

    @property
    def vocab(self) -> int:
        """Of the tokenizer."""
        return self.tokenizer.vocab


def open_hub(name: str, field: str) -> Opened:
    """The train split of a data set.

    Args: name: NAME or NAME:SUBSET on the hub, or the path of a folder. field: which holds the text.
    Raises: DataError when there is no such data set, subset or field, or the hub cannot be reached.
    """
    import datasets  # here, because most runs do without

    path, _, subset = name.partition(":")
    try:
        dataset: Any = datasets.load_dataset(path, subset or None, split="train", streaming=True)
        columns = dataset.column_names or list(next(iter(copy.deepcopy(dataset)), {field: ""}))
    except Exception as error:  # as in `Opened.texts`
        seen = "it was not accepted" if Path(path).is_dir() else "no such folder exists, and the hub did not give it"
        raise DataError(
            f"hf:{name} was asked for, but {seen} ({first_line(error)}); "
            "check the name, the subset and the connection, or use text:PATH"
        ) from error
    if field not in columns:
        raise no_field(field, f"hf:{name}", sorted(columns))
    return Opened(name, dataset, field)


def hub_documents(opened: Opened, *, most: int) -> Iterator[Document]:
    """The documents from the beginning, at most `most` of them, all of one domain."""
    for text in islice(opened.texts(opened.copy()), most):
        yield Document(opened.domain, text)


class StreamShard:
    """Every k-th document after those held out, packed end to end into rows, in the order of the stream.

    Each worker reads the whole stream and tokenises its own documents. A pass ends with the stream; the tokens that do
    not fill a batch by then are left out, and the next pass takes the same documents in the same order. The position is
    that of the last document begun, and the tokens used of it. A stream's length is unknown, so `size` is the tokens of
    one batch, and all workers weigh the same.

    Args: stream; worker, of workers: which documents. batch, length: rows, and predicted tokens per row.
    """

    def __init__(self, stream: Stream, *, worker: int, workers: int, batch: int, length: int) -> None:
        self.size = batch * (length + 1)
        self.passes = 0
        self._stream, self._worker, self._workers = stream, worker, workers
        self._shape = (batch, length + 1)
        self._rewind(None)

    def next_batch(self) -> Tensor:
        """Tokens int64 [batch, length + 1].

        Raises: DataError when a whole pass does not fill one batch, or reading stops halfway.
        """
        parts, have, rewound = [self._rest], self._rest.numel(), False
        while have < self.size:
            document = self._next_document()
            if document is not None:
                parts.append(document)
                have += document.numel()
            elif rewound:
                raise DataError(
                    f"worker {self._worker} of {self._workers} needs {self.size} tokens for one batch, but its "
                    f"documents of {self._stream.name} have only {have}; "
                    "lower --workers, --batch or --length, or use more data"
                )
            else:
                self.passes += 1
                self._rewind(None)
                parts, have, rewound = [], 0, True
        # What is left over is the end of the last document: before that one came, there was not enough.
        tokens = torch.cat(parts)
        self._rest = tokens[self.size :].clone()
        return tokens[: self.size].view(self._shape)

    def state_dict(self) -> dict[str, Any]:
        """The position: JSON-able values."""
        used = self._length - self._rest.numel()
        return {"pass": self.passes, "document": self._begun, "used": used, "stream": self._before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises: CheckpointError when the stream has no such position.
        """
        try:
            self.passes, used = int(state["pass"]), int(state["used"])
            self._rewind(state["stream"])
            self._next = int(state["document"])
            document = self._next_document() if used else self._rest
        except (KeyError, TypeError, ValueError, DataError) as error:
            raise self._elsewhere(str(error)) from error
        if document is None or document.numel() < used or self._begun != state["document"]:
            where = f"token {used} of document {state['document']}"
            raise self._elsewhere(f"worker {self._worker} of {self._workers} has no {where}")
        # Until it has yielded something, a data set does not tell where it was put.
        self._before = state["stream"]
        self._rest = document[used:]

    def _elsewhere(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint's data position was looked up in {self._stream.name}, but is not there ({why}); "
            "resume with the data, tokenizer and workers of the run"
        )

    def _rewind(self, position: Any) -> None:
        dataset = self._stream.opened.copy()
        if position:
            dataset.load_state_dict(copy.deepcopy(position))
        self._dataset, self._texts = dataset, self._stream.opened.texts(dataset)
        self._next = self._begun = 0
        self._before: Any = None
        self._length, self._rest = 0, torch.empty(0, dtype=torch.int64)

    def _next_document(self) -> Tensor | None:
        """The tokens of this worker's next document, None at the end of the stream; notes where the document begins."""
        before: Any = None
        mine = False
        text = ""
        while not mine:
            after = self._next - HELD_OUT_DOCUMENTS
            mine = after >= 0 and after % self._workers == self._worker
            before = self._dataset.state_dict() if mine else None
            following = next(self._texts, None)
            if following is None:
                return None
            text, self._next = following, self._next + 1
        tokenizer = self._stream.tokenizer
        tokens = tokenizer.encode(text).long()
        if text and tokenizer.end is not None:
            tokens = torch.cat([tokens, torch.tensor([tokenizer.end])])
        self._begun, self._before, self._length = self._next - 1, before, tokens.numel()
        return tokens
