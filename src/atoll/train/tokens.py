"""Tokenizers: text to token ids. Bytes need nothing; the others come from transformers."""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from atoll.errors import DataError


class Tokenizer(Protocol):
    """Text to tokens.

    `vocab` is the number of token ids; `end` follows each document (None: nothing does); `name` tells tokenizers apart
    in records.
    """

    @property
    def vocab(self) -> int:
        """Token ids run from 0 to vocab - 1."""
        ...

    @property
    def name(self) -> str:
        """As shown in records."""
        ...

    @property
    def end(self) -> int | None:
        """The id that ends a document."""
        ...

    def encode(self, text: str) -> Tensor:
        """The ids of `text`: integers [tokens], with nothing added before or after."""
        ...


class _Bytes:
    vocab = 256
    name = "bytes"
    end = 0

    def encode(self, text: str) -> Tensor:
        # bytearray, because torch warns about memory that it may not write; and it refuses an empty one.
        raw = bytearray(text.encode(errors="replace"))
        return torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


class _Hub:
    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name = name
        self.vocab = len(tokenizer)
        self.end: int | None = tokenizer.eos_token_id
        self._tokenizer = tokenizer

    def encode(self, text: str) -> Tensor:
        # verbose=False: a document longer than the tokenizer's model is no reason to warn, as it will be cut.
        ids = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int32)


def bytes_tokenizer() -> Tokenizer:
    """The UTF-8 bytes of the text; a zero byte, which text does not hold, ends a document.

    Example:
        >>> bytes_tokenizer().encode("atoll").tolist()
        [97, 116, 111, 108, 108]
    """
    return _Bytes()


def hub_tokenizer(path_or_name: str) -> Tokenizer:
    """A Hugging Face tokenizer; its end-of-sequence token, where it has one, ends a document.

    Args: path_or_name: a folder with tokenizer files, or a name on the hub.
    Raises: DataError when there is no such tokenizer, or the hub cannot be reached.
    """
    from transformers import AutoTokenizer  # here, because it takes seconds and bytes do without

    folder = Path(path_or_name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path_or_name)
    # transformers lets through whatever a bad file raises inside of it.
    except Exception as error:
        seen = (
            "its files were not accepted" if folder.is_dir() else "no such folder exists, and the hub did not give it"
        )
        raise DataError(
            f"the tokenizer {path_or_name!r} was asked for, but {seen} ({first_line(error)}); "
            "give the path of a folder with tokenizer files, a name on the hub that this machine can reach, or bytes"
        ) from error
    # Only the last part of a folder's path, so that peers that keep the same tokenizer in different places agree.
    return _Hub(folder.resolve().name if folder.is_dir() else path_or_name, tokenizer)


def first_line(error: Exception) -> str:
    """What a library raised, short enough to quote."""
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(" :")
