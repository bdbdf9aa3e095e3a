"""What cannot be used as data is one sentence that says what was asked, what was seen and what to do."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from atoll.errors import DataError
from atoll.train.corpus import Corpus, load_corpus
from atoll.train.shards import by_domain, held_out_batches, iid, make_shards
from atoll.train.tokens import bytes_tokenizer


def refused(source: str, *words: str) -> None:
    with pytest.raises(DataError) as raised:
        load_corpus(source, bytes_tokenizer())
    message = str(raised.value)
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message


def test_an_unknown_source_names_the_nearest(tmp_path: Path) -> None:
    refused("buitlin", "'buitlin'", "did you mean builtin?")
    refused("txt:poems", "did you mean text:PATH?")
    refused("text:", "did you mean text:PATH?")
    refused("http://somewhere", "builtin, text:PATH, hf:NAME[:SUBSET]")
    (tmp_path / "poem.txt").write_text("x")
    refused(f"{tmp_path}/poem.txt", f"did you mean text:{tmp_path}/poem.txt?")


def test_a_missing_or_empty_path_is_named(tmp_path: Path) -> None:
    refused(f"text:{tmp_path}/nowhere.txt", "nowhere.txt", "nothing is there", "check the path")
    refused(f"text:{tmp_path}", str(tmp_path), "no files")
    (tmp_path / "empty.txt").touch()
    refused(f"text:{tmp_path}", "no text in it")


def test_what_is_not_text_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\xe9 au lait".encode("latin-1"))
    refused(f"text:{tmp_path}", "latin.txt", "not UTF-8", "byte 3 is 0xe9")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "x"}\n{"text": "caf\xe9"}')
    refused(f"text:{tmp_path}/latin.jsonl", "line 2 of", "not UTF-8")
    (tmp_path / "poem.txt.gz").write_bytes(b"x")
    refused(f"text:{tmp_path}/poem.txt.gz", ".gz", "unpack it")


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(file: Path) -> bytes:
        raise PermissionError(13, "Permission denied", file)

    (tmp_path / "secret.txt").write_text("x")
    monkeypatch.setattr(Path, "read_bytes", denied)  # not chmod: root may read everything
    refused(f"text:{tmp_path}", "secret.txt", "Permission denied")


def test_records_without_text_say_where_and_what_they_have(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"body": "y", "id": 1}')
    refused(f"text:{tmp_path}", "line 2 of", "'body', 'id'", "#FIELD")
    refused(f"text:{tmp_path}#id", "line 1 of", "'text'")
    (tmp_path / "a.jsonl").write_text('{"text": 7}')
    refused(f"text:{tmp_path}", "line 1 of", "int")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": ')
    refused(f"text:{tmp_path}", "line 2 of", "not JSON", "one object per line")
    (tmp_path / "a.jsonl").write_text('"x"')
    refused(f"text:{tmp_path}", "line 1 of", "str")


def test_parquet_without_text_or_broken_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    refused(f"text:{tmp_path}", "a.parquet", "'body', 'n'")
    refused(f"text:{tmp_path}#n", "a.parquet", "int")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    refused(f"text:{tmp_path}", "a.parquet", "cannot be read")


def corpus(held_out: int = 100, **domains: int) -> Corpus:
    tokens = {domain: torch.zeros(size, dtype=torch.uint8) for domain, size in domains.items()}
    return Corpus("tiny", 256, tokens, torch.zeros(held_out, dtype=torch.uint8), "")


def test_more_workers_than_data_says_how_many_tokens_there_are_and_are_needed() -> None:
    with pytest.raises(DataError, match=r"5 workers.* need 650 .*has 640 .*lower --workers, --batch or --length"):
        make_shards(corpus(a=640), iid(), workers=5, batch=2, length=64, seed=0)
    make_shards(corpus(a=650), iid(), workers=5, batch=2, length=64, seed=0)


def test_a_worker_whose_domains_are_too_small_is_named_with_them() -> None:
    with pytest.raises(DataError, match=r"worker 1 would get only 1 of 2 blocks \(from small\)"):
        make_shards(corpus(large=1000, small=100), by_domain(), workers=2, batch=2, length=64, seed=0)


def test_fewer_domains_than_workers_are_refused() -> None:
    with pytest.raises(DataError, match=r"3 workers .* only 2 \(a, b\); lower --workers to at most 2, or .* iid"):
        make_shards(corpus(a=1000, b=1000, empty=0), by_domain(), workers=3, batch=1, length=8, seed=0)


@pytest.mark.parametrize("name", ["workers", "batch", "length", "seed"])
def test_numbers_out_of_range_are_refused(name: str) -> None:
    numbers = {"workers": 1, "batch": 1, "length": 1, "seed": 0} | {name: -1}
    with pytest.raises(DataError, match=f"--{name} was -1"):
        make_shards(corpus(a=1000), iid(), **numbers)


def test_held_out_text_of_less_than_two_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="tiny is so small that 1 are held out"):
        held_out_batches(corpus(held_out=1, a=10), batch=4, length=8, most=2)
