"""Sources become tokens, domains, a held-out part and a fingerprint."""

import json
import sysconfig
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from atoll.train.corpus import Corpus, load_corpus
from atoll.train.tokens import bytes_tokenizer


class Numbers:
    """A text of numbers is those tokens, so that each token can tell where it came from."""

    name = "numbers"
    end = None

    def __init__(self, vocab: int = 1 << 20) -> None:
        self.vocab = vocab

    def encode(self, text: str) -> Tensor:
        return torch.tensor([int(word) for word in text.split()], dtype=torch.int64)


def numbers(first: int, last: int) -> str:
    return " ".join(map(str, range(first, last)))


def load(source: object, vocab: int = 1 << 20) -> Corpus:
    corpus = load_corpus(f"text:{source}", Numbers(vocab))
    assert isinstance(corpus, Corpus)
    return corpus


def read(source: object) -> dict[str, bytes]:
    """The bytes by domain of a text that is too short for anything to be held out."""
    corpus = load_corpus(f"text:{source}", bytes_tokenizer())
    assert isinstance(corpus, Corpus)
    assert corpus.held_out.numel() == 0
    return {domain: bytes(tokens.tolist()) for domain, tokens in corpus.domains.items()}


def test_builtin_is_the_source_text_of_the_interpreters_library() -> None:
    corpus = load_corpus("builtin", bytes_tokenizer())
    assert isinstance(corpus, Corpus)
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes() + b"\0"
    kept = bytes(corpus.domains["argparse"].tolist())
    assert kept[:1000] == source[:1000]
    assert len(source) * 0.9 < len(kept) <= len(source)
    assert {"asyncio", "email", "json", "others"} <= corpus.domains.keys()
    assert not {"test", "site-packages"} & corpus.domains.keys()
    assert corpus.tokens > 4_000_000


def test_each_token_is_in_training_or_held_out_in_order_and_never_in_both(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text(numbers(50_000, 60_000))
    (tmp_path / "a.txt").write_text(numbers(0, 50_000))
    corpus = load(tmp_path)
    training = torch.cat(list(corpus.domains.values())).tolist()
    held_out = corpus.held_out.tolist()
    assert list(corpus.domains) == ["a.txt", "b.txt"]
    assert max(corpus.domains["a.txt"]) < 50_000 <= min(corpus.domains["b.txt"])
    assert training == sorted(training)
    assert held_out == sorted(held_out)
    assert sorted(training + held_out) == list(range(60_000))


def test_one_token_of_32_is_held_out_in_pieces_from_all_over(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(numbers(0, 64_000))
    held_out = load(tmp_path).held_out.tolist()
    starts = [token for token, before in zip(held_out, [-2, *held_out], strict=False) if token != before + 1]
    assert len(held_out) == pytest.approx(2000, abs=7)
    assert len(starts) == 7  # 2,000 tokens in pieces of 256 or more
    gaps = [later - sooner for sooner, later in pairwise(starts)]
    assert max(gaps) - min(gaps) <= 1


def test_the_smallest_type_that_holds_the_vocabulary_is_used(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 255")
    for vocab, dtype in ((256, torch.uint8), (257, torch.uint16), (65_536, torch.uint16), (65_537, torch.int32)):
        assert load(tmp_path, vocab=vocab).domains["a.txt"].dtype == dtype
    (tmp_path / "a.txt").write_text("1 65535")
    assert load(tmp_path, vocab=65_536).domains["a.txt"].long().tolist() == [1, 65_535]


def test_the_fingerprint_depends_on_text_tokenizer_and_domains_and_not_on_the_place(tmp_path: Path) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.txt").write_text("1 2 3 4")
    first = load(tmp_path / "here").fingerprint
    assert load(tmp_path / "there").fingerprint == first
    assert load(tmp_path / "here", vocab=300).fingerprint != first
    assert load_corpus(f"text:{tmp_path / 'here'}", bytes_tokenizer()).fingerprint != first
    (tmp_path / "there" / "a.txt").write_text("1 2 3 5")
    assert load(tmp_path / "there").fingerprint != first
    (tmp_path / "here" / "a.txt").rename(tmp_path / "here" / "b.txt")
    assert load(tmp_path / "here").fingerprint != first


def test_files_and_subfolders_at_the_top_are_domains_and_dot_files_are_left_out(tmp_path: Path) -> None:
    for name in ("sea/deep/x.txt", "sea/a.md", "top.py", ".git/config", "sea/.hidden"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == {"sea": b"sea/a.md\0sea/deep/x.txt\0", "top.py": b"top.py\0"}


def test_json_lines_lists_and_parquet_rows_are_documents(tmp_path: Path) -> None:
    texts = ["a\u2028b", "", "ü"]
    records = [{"text": text, "id": number} for number, text in enumerate(texts)]
    lines = "\n\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    (tmp_path / "lines.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    (tmp_path / "list.json").write_text(json.dumps(records, indent=1))
    pq.write_table(pa.table({"id": [1, 2, 3, 4], "text": [*texts, None]}), tmp_path / "rows.parquet", row_group_size=2)
    expected = "a\u2028b\0ü\0".encode()
    assert read(tmp_path) == {"lines.jsonl": expected, "list.json": expected, "rows.parquet": expected}


def test_the_field_of_the_text_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "no", "body": "yes"}')
    assert read(f"{tmp_path}/a.jsonl#body") == {"a.jsonl": b"yes\0"}


def test_half_a_character_in_json_does_not_stop_a_run(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}')
    assert read(tmp_path) == {"a.jsonl": b"a?b\0"}
