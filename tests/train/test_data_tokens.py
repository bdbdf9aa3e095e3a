"""Tokenizers: text to tokens."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from atoll.errors import DataError
from atoll.train.corpus import Corpus, load_corpus
from atoll.train.tokens import bytes_tokenizer, hub_tokenizer

WORDS = {"<end>": 0, "the": 1, "sea": 2, "?": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizers") / "words"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="?").save_pretrained(folder)
    return folder


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_are_utf8(text: str) -> None:
    tokens = bytes_tokenizer().encode(text)
    assert bytes(tokens.tolist()) == text.encode()
    assert tokens.dtype == torch.uint8


def test_a_hub_tokenizer_has_the_vocabulary_and_the_end_of_its_folder(saved: Path) -> None:
    tokenizer = hub_tokenizer(str(saved))
    assert (tokenizer.vocab, tokenizer.end, tokenizer.name) == (4, 0, "words")
    assert tokenizer.encode("the sea the island").tolist() == [1, 2, 1, 3]


def test_documents_are_separated_by_the_end_token(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the sea"}\n{"text": "sea"}')
    corpus = load_corpus(f"text:{tmp_path}", hub_tokenizer(str(saved)))
    assert isinstance(corpus, Corpus)
    assert corpus.vocab == 4
    assert corpus.domains["a.jsonl"].tolist() == [1, 2, 0, 2, 0]


def test_a_tokenizer_that_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    for name, seen in (("/no/such/tokenizer", "no such folder exists"), (str(tmp_path), "its files were not accepted")):
        with pytest.raises(DataError, match=seen) as raised:
            hub_tokenizer(name)
        assert name in str(raised.value)
        assert "\n" not in str(raised.value)
