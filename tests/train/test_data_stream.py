"""Hub data sets: streamed from a local folder here, which `datasets` reads by the same code."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from atoll.errors import CheckpointError, DataError
from atoll.train.corpus import Corpus, load_corpus
from atoll.train.shards import Shard, by_domain, held_out_batches, iid, make_shards
from atoll.train.stream import Stream
from atoll.train.tokens import bytes_tokenizer

HELD_OUT = 256
DOCUMENTS = [f"document {number} " + "~" * (number * 7 % 90) for number in range(HELD_OUT + 60)]


def write(folder: Path, documents: list[str], files: int = 3) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    size = -(-len(documents) // files)
    for number in range(files):
        part = documents[number * size : (number + 1) * size]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return folder


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Stream:
    corpus = load_corpus(f"hf:{write(tmp_path_factory.mktemp('hub') / 'data', DOCUMENTS)}", bytes_tokenizer())
    assert isinstance(corpus, Stream)
    return corpus


def rows_of(worker: int, workers: int, size: int) -> Iterator[bytes]:
    """What a worker should see in a pass: its documents end to end, in batches of `size` bytes."""
    tokens = "".join(text + "\0" for text in DOCUMENTS[HELD_OUT + worker :: workers]).encode()
    return (tokens[start : start + size] for start in range(0, len(tokens) // size * size, size))


def shards(stream: Stream, workers: int) -> tuple[Shard, ...]:
    return make_shards(stream, iid(), workers=workers, batch=3, length=19, seed=0)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_take_every_kth_document_after_those_held_out(stream: Stream, workers: int) -> None:
    for worker, shard in enumerate(shards(stream, workers)):
        expected = list(rows_of(worker, workers, 60))
        for _ in range(2):  # passes
            assert [bytes(shard.next_batch().flatten().tolist()) for _ in expected] == expected
        assert shard.next_batch().shape == (3, 20)
        assert shard.passes == 2


def test_shards_of_one_stream_do_not_disturb_one_another(stream: Stream) -> None:
    apart, turns = shards(stream, 2), shards(stream, 2)
    expected = [[shard.next_batch() for _ in range(5)] for shard in apart]
    seen = [[shard.next_batch() for shard in turns] for _ in range(5)]
    assert all(torch.equal(expected[m][t], seen[t][m]) for m in range(2) for t in range(5))


def test_the_first_documents_are_held_out(stream: Stream) -> None:
    text = "".join(document + "\0" for document in DOCUMENTS[:HELD_OUT]).encode()
    assert bytes(stream.held_out.tolist()) == text
    assert held_out_batches(stream, batch=2, length=19, most=3)[0].shape == (2, 20)


@pytest.mark.parametrize("done", [0, 1, 2, 5, 40])
def test_a_resumed_stream_is_the_uninterrupted_one(stream: Stream, done: int) -> None:
    whole, stopped, resumed, again = (shards(stream, 2)[1] for _ in range(4))
    for _ in range(done):
        whole.next_batch()
        stopped.next_batch()
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
    assert (resumed.passes, resumed.size) == (whole.passes, whole.size)
    for _ in range(40):
        expected = whole.next_batch()
        assert torch.equal(resumed.next_batch(), expected)
        assert torch.equal(again.next_batch(), expected)


def test_a_position_that_the_stream_does_not_have_is_refused(stream: Stream) -> None:
    shard = shards(stream, 2)[0]
    shard.next_batch()
    for change in ({"used": 10_000}, {"document": None}, {"document": HELD_OUT + 1}):
        with pytest.raises(CheckpointError, match="is not there"):
            shards(stream, 2)[0].load_state_dict(shard.state_dict() | change)
    with pytest.raises(CheckpointError, match="resume with the data, tokenizer and workers of the run"):
        shards(stream, 2)[0].load_state_dict({"pass": 0, "offset": 3, "size": 10})


def test_a_stream_too_small_for_a_batch_is_refused_instead_of_read_for_ever(stream: Stream) -> None:
    have = len("".join(text + "\0" for text in DOCUMENTS[HELD_OUT::50]))
    shard = make_shards(stream, iid(), workers=50, batch=4, length=99, seed=0)[0]
    with pytest.raises(DataError, match=rf"worker 0 of 50 needs 400 tokens .* have only {have}; lower --workers"):
        shard.next_batch()


def test_a_stream_cannot_be_shared_by_domain(stream: Stream) -> None:
    with pytest.raises(DataError, match=r"a stream has no domains"):
        make_shards(stream, by_domain(), workers=2, batch=1, length=9, seed=0)


def test_a_small_data_set_is_read_into_memory(tmp_path: Path) -> None:
    everything = "".join(text + "\0" for text in DOCUMENTS[:HELD_OUT]).encode()
    corpus = load_corpus(f"hf:{write(tmp_path / 'small', DOCUMENTS[:HELD_OUT])}", bytes_tokenizer())
    assert isinstance(corpus, Corpus)
    (tokens,) = corpus.domains.values()
    assert tokens.numel() + corpus.held_out.numel() == len(everything)
    assert bytes(tokens[:400].tolist()) == everything[:400]


def test_the_fingerprint_is_that_of_the_held_out_text(stream: Stream, tmp_path: Path) -> None:
    same = load_corpus(f"hf:{write(tmp_path / 'x' / 'data', DOCUMENTS[:-1])}", bytes_tokenizer())
    other = load_corpus(f"hf:{write(tmp_path / 'y' / 'data', ['changed', *DOCUMENTS[1:]])}", bytes_tokenizer())
    assert len({stream.fingerprint, same.fingerprint, other.fingerprint}) == 2
    assert other.fingerprint != stream.fingerprint


def test_what_the_hub_does_not_give_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(source: str, *words: str) -> None:
        with pytest.raises(DataError) as raised:
            load_corpus(source, bytes_tokenizer())
        assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)
        assert "\n" not in str(raised.value)

    refused("hf:/no/such/folder", "hf:/no/such/folder", "no such folder exists", "text:PATH")
    (tmp_path / "empty").mkdir()
    refused(f"hf:{tmp_path}/empty", "was not accepted", "check the name")
    folder = write(tmp_path / "data", DOCUMENTS[:4], files=1)
    refused(f"hf:{folder}:french", "french", "check the name, the subset")
    refused(f"hf:{folder}#body", "'body'", "'text'", "#FIELD")
    (folder / "0.jsonl").write_text('{"text": 1}\n{"text": 2}\n')
    refused(f"hf:{folder}", "holds int")
    (folder / "0.jsonl").write_text('{"text": ""}\n')
    refused(f"hf:{folder}", "no text in it")

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'c4' on the Hub\nand more")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    refused("hf:c4:en", "hf:c4:en", "Couldn't reach 'c4' on the Hub", "connection")


def test_a_stream_that_breaks_halfway_is_one_sentence(stream: Stream, tmp_path: Path) -> None:
    folder = write(tmp_path / "broken", DOCUMENTS, files=1)
    corpus = load_corpus(f"hf:{folder}", bytes_tokenizer())
    assert isinstance(corpus, Stream)
    (shard,) = shards(corpus, 1)
    (folder / "0.jsonl").unlink()
    with pytest.raises(DataError, match="was being read, but that stopped"):
        list(islice(iter(shard.next_batch, None), 1000))
