"""Corpora: text as tokens, by domain, with a held-out part that no seed and no number of workers changes."""

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from atoll.errors import DataError
from atoll.train.documents import Document, standard_library, text_documents
from atoll.train.stream import HELD_OUT_DOCUMENTS, Stream, hub_documents, open_hub
from atoll.train.tokens import Tokenizer

HELD_OUT_PART = 32
"""One token of so many is held out,"""
HELD_OUT_MOST = 1 << 20
"""up to this many tokens,"""
HELD_OUT_PIECES = 256
"""in at most so many pieces of equal length, evenly spread over the corpus,"""
HELD_OUT_PIECE = 256
"""of at least so many tokens (one piece, where less than that is held out)."""
SOURCES = {"builtin": "builtin", "text": "text:PATH", "hf": "hf:NAME[:SUBSET]"}
"""How each kind of source is asked for."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens in memory.

    Args:
        name: the source as it was asked for. vocab: of the tokenizer.
        domains: training tokens [tokens] by domain, in the smallest of uint8, uint16 and int32 that holds the vocab.
        held_out: tokens [tokens] for evaluation, from all over the corpus.
        fingerprint: 16 hex digits of the sha256 over the kind of source, the tokenizer, and all domains unsplit.
    """

    name: str
    vocab: int
    domains: Mapping[str, Tensor]
    held_out: Tensor
    fingerprint: str

    @property
    def tokens(self) -> int:
        """Training tokens in all domains."""
        return sum(tokens.numel() for tokens in self.domains.values())


def load_corpus(source: str, tokenizer: Tokenizer) -> Corpus | Stream:
    """Read a source and hold out a part of it.

    - `builtin`: the running interpreter's standard library (`standard_library`), about 11 MB; interpreters differ.
    - `text:PATH[#FIELD]`: a file or a folder of text, JSON lines or Parquet (`text_documents`).
    - `hf:NAME[:SUBSET][#FIELD]`: the train split of a data set on the Hugging Face hub, or of a folder that `datasets`
      reads. It is streamed, unless it has at most 256 documents: then it is read into memory.

    One token of 32, at most 2^20, is held out in pieces spread evenly over the corpus; a piece and its neighbours may
    come from one document. A stream holds out its first 256 documents.

    Args: source: as above; FIELD is where JSON, Parquet and hub records have their text, `text` by default.
    Raises: DataError when the source is unknown, missing, empty or not readable.

    Example:
        >>> from atoll.train.tokens import bytes_tokenizer
        >>> "json" in load_corpus("builtin", bytes_tokenizer()).domains
        True
    """
    kind, colon, rest = source.partition(":")
    place, _, field = rest.partition("#")
    match kind:
        case "builtin" if not colon:
            domains = _tokenise(standard_library(), tokenizer)
        case "text" if place:
            path = Path(place).expanduser()
            domains = _tokenise(text_documents(path, field or "text"), tokenizer)
        case "hf" if place:
            opened = open_hub(place, field or "text")
            first = list(hub_documents(opened, most=HELD_OUT_DOCUMENTS + 1))
            domains = _tokenise(first[:HELD_OUT_DOCUMENTS], tokenizer)
            if domains and len(first) > HELD_OUT_DOCUMENTS:
                held_out = domains[opened.domain][:HELD_OUT_MOST]
                return Stream(source, tokenizer, opened, held_out, _fingerprint(kind, tokenizer, domains))
        case _:
            raise _unknown(source)
    if not domains:
        raise DataError(f"{source} was read, but there is no text in it; give a source with text")
    training, held_out = _hold_out(domains)
    return Corpus(source, tokenizer.vocab, training, held_out, _fingerprint(kind, tokenizer, domains))


def _unknown(source: str) -> DataError:
    forms = ", ".join(SOURCES.values())
    near = difflib.get_close_matches(source.partition(":")[0], SOURCES, n=1)
    if Path(source).expanduser().exists():
        hint = f"did you mean text:{source}?"
    elif near:
        hint = f"did you mean {SOURCES[near[0]]}?"
    else:
        hint = "begin with one of these words"
    return DataError(f"the data {source!r} was asked for, which is none of {forms}; {hint}")


def _tokenise(documents: Iterable[Document], tokenizer: Tokenizer) -> dict[str, Tensor]:
    """The tokens of each domain that has any, each document with the tokenizer's end."""
    dtype = torch.uint8 if tokenizer.vocab <= 1 << 8 else torch.uint16 if tokenizer.vocab <= 1 << 16 else torch.int32
    end = b"" if tokenizer.end is None else torch.tensor([tokenizer.end]).to(dtype).numpy().tobytes()
    raw: dict[str, bytearray] = {}
    for domain, text in documents:
        if text:
            raw.setdefault(domain, bytearray()).extend(tokenizer.encode(text).to(dtype).numpy().tobytes() + end)
    return {domain: torch.frombuffer(buffer, dtype=dtype) for domain, buffer in raw.items() if buffer}


def _hold_out(domains: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Cut the corpus, all domains in a row, into stretches of equal length; the end of each is held out."""
    total = sum(tokens.numel() for tokens in domains.values())
    most = min(total // HELD_OUT_PART, HELD_OUT_MOST)
    pieces = min(max(1, most // HELD_OUT_PIECE), HELD_OUT_PIECES)
    size = most // pieces
    training: dict[str, Tensor] = {}
    held_out: list[Tensor] = []
    first = 0
    for domain, tokens in domains.items():
        last, at, kept = first + tokens.numel(), 0, list[Tensor]()
        for stretch in range(first * pieces // total, min(pieces, last * pieces // total + 1)):
            end = (stretch + 1) * total // pieces
            low, high = max(end - size, first) - first, min(end, last) - first
            if low < high:
                kept.append(tokens[at:low])
                held_out.append(tokens[low:high])
                at = high
        training[domain] = torch.cat([*kept, tokens[at:]])
        first = last
    return training, torch.cat(held_out or [tokens[:0] for tokens in domains.values()])


def _fingerprint(kind: str, tokenizer: Tokenizer, domains: Mapping[str, Tensor]) -> str:
    sizes = {domain: tokens.numel() for domain, tokens in domains.items()}
    digest = hashlib.sha256(json.dumps([kind, tokenizer.name, tokenizer.vocab, sizes]).encode())
    for tokens in domains.values():
        digest.update(tokens.numpy().data)
    return digest.hexdigest()[:16]
