"""Messages to the bit: what is written is read as it was, in one form only, and nothing else is taken for a message."""

import json
from dataclasses import fields
from pathlib import Path
from types import EllipsisType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.peers.wide.messages import (
    LONG,
    MOST,
    MOST_RECORD,
    BadMessage,
    Beat,
    Bulk,
    Committed,
    Done,
    Epoch,
    Fetch,
    Gone,
    Head,
    Hello,
    Leave,
    Promise,
    Record,
    Want,
    read,
    write,
)
from atoll.sync.rule import Strategy
from atoll.wire import Key
from tests.peers.wide.fuzz import DILOCO, STREAMING, WORKERS, Storm, accepted
from tests.peers.wide.mutations import forged, sealed

KEY = Key(1, 2, 3)
WIDE = st.integers(-(2**63), 2**63 - 1)
KEYS = st.tuples(st.integers(-(2**31), 2**31 - 1), WIDE, WIDE).map(lambda numbers: Key(*numbers))
TEXTS = st.text(max_size=20).filter(str.isprintable)


def whole(message: Any) -> bytes:
    return b"".join(write(message))


def head(**given: Any) -> Head:
    usual: dict[str, Any] = {"key": KEY, "to": (0,), "weight": 1.0, "norm": 1.0, "signals": ()} | given
    return Head(**{field.name: usual.get(field.name, "") for field in fields(Head)})


def some(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a record's field."""
    if hint is Key:
        return KEYS
    if get_origin(hint) is tuple:
        first, *rest = get_args(hint)
        if rest and isinstance(rest[0], EllipsisType):
            return st.lists(some(first), max_size=4).map(tuple)
        return st.tuples(some(first), *map(some, rest))
    if get_origin(hint) is Annotated:
        kind, room = get_args(hint)
        return TEXTS if kind is str else st.integers(room.start, room.stop - 1)
    return {float: st.floats(), bool: st.booleans(), str: TEXTS}[hint]


def records(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, *(some(hints[field.name]) for field in fields(kind)))


RECORDS = st.one_of([records(kind) for kind in get_args(Record)])
BULKS = st.builds(
    Bulk,
    KEYS,
    st.integers(0, 2),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 2**16 - 1), max_size=5).map(tuple),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=40),
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["0x1.8p+1", "nan"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(RECORDS)
def test_a_record_travels_as_json_and_arrives_as_it_was(record: Any) -> None:
    frame = whole(record)
    assert frame == forged(record)
    assert repr(read(frame)) == repr(record)
    assert whole(read(frame)) == frame


@settings(max_examples=200, deadline=None)
@given(BULKS)
def test_a_bulk_travels_as_its_place_and_its_bytes_and_arrives_as_it_was(bulk: Bulk) -> None:
    frame = whole(bulk)
    assert frame == forged(bulk)
    back = read(frame)
    assert isinstance(back, Bulk)
    assert Bulk(back.key, back.phase, back.version, back.part, back.chunk, bytes(back.payload)) == bulk


@settings(max_examples=60, deadline=None)
@given(RECORDS | BULKS, st.binary(min_size=1, max_size=9))
def test_what_is_cut_off_added_or_flipped_is_refused(message: Any, more: bytes) -> None:
    frame = whole(message)
    damaged = [frame[:length] for length in range(len(frame))] + [frame + more, more + frame]
    for spot in range(len(frame)):
        damaged += [frame[:spot] + bytes([frame[spot] ^ 1 << bit]) + frame[spot + 1 :] for bit in range(8)]
    for each in damaged:
        with pytest.raises(BadMessage):
            read(each)


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=80)
    | st.builds(sealed, st.integers(0, 3), st.binary(max_size=80))
    | st.builds(
        lambda name, values: sealed(0, json.dumps([name, *values], separators=(",", ":")).encode()),
        st.sampled_from([kind.__name__ for kind in get_args(Record)]),
        st.lists(JSON, max_size=7),
    )
)
def test_whatever_comes_is_refused_or_is_a_message_in_its_only_form(frame: bytes) -> None:
    try:
        message = read(frame)
    except BadMessage:
        return
    assert whole(message) == frame


@pytest.mark.parametrize(
    "text",
    [
        '["Fetch", [1,2,3],4]',
        ' ["Fetch",[1,2,3],4]',
        '["Fetch",[1,2,3],4]\n',
        '["F\\u0065tch",[1,2,3],4]',
        '["Fetch",[1,2,3],4.0]',
        '["Fetch",[1,2,3],4e0]',
        '["Fetch",[1,2,3],-0]',
        '["Fetch",[1,2,3],true]',
        '["Fetch",[1,2,3],"4"]',
        '["Fetch",[1,2,3],null]',
        '["Fetch",[1,2,3],NaN]',
        '["Fetch",[1,2,3],4,5]',
        '["Fetch",[1,2,3]]',
        '["Fetch",[1,2,3,0],4]',
        '["Fetch",[1,2],4]',
        '["Fetch",{"1":2},4]',
        '["Fetch",123,4]',
        '["Fetch","123",4]',
        '["Fetch",[1,2,3],' + "4" * 5000 + "]",
        '["Fetch",[1,2,' + "[" * 100_000,
        "[" * 50_000 + "]" * 50_000,
        '["Bulk",[1,2,3],0,0,[],0,"x"]',
        '["BadMessage"]',
        '[["Fetch"],[1,2,3],4]',
        '{"Fetch":[[1,2,3],4]}',
        '"Fetch"',
        "[]",
        "",
        '["Gone",[1,2]]]',
        '["Gone",[true]]',
        '["Gone",[1.5]]',
        '["Gone",1]',
        '["Leave","\\ud800"]',
        '["Leave","\\u00E9"]',
        '["Leave","é"]',
        '["Leave","a\\nb"]',
        '["Leave","\\u001b[2J"]',
        '["Leave",["why"]]',
        '["Beat",1,2,3,"0x1.8p+1","0x1.80p+1",[],true]',
        '["Beat",1,2,3,"0x1.8p+1","0X1.8p+1",[],true]',
        '["Beat",1,2,3,"0x1.8p+1","3.0",[],true]',
        '["Beat",1,2,3,"0x1.8p+1","NaN",[],true]',
        '["Beat",1,2,3,"0x1.8p+1","-nan",[],true]',
        '["Beat",1,2,3,"0x1.8p+1","0x1p+99999",[],true]',
        '["Beat",1,2,3,"0x1.8p+1",3,[],true]',
        '["Beat",1,2,3,"0x1.8p+1",NaN,[],true]',
        '["Beat",1,2,3,"0x1.8p+1","nan",[],1]',
        '["Beat",1,2,3,"0x1.8p+1","nan",[[1]],true]',
    ],
)
def test_a_record_that_is_spelled_otherwise_is_refused(text: str) -> None:
    for encoding in ("utf-8", "utf-16", "utf-8-sig"):
        with pytest.raises(BadMessage):
            read(sealed(0, text.encode(encoding)))


@pytest.mark.parametrize(
    "message",
    [
        Fetch(KEY, -1),
        Fetch(KEY, 2**32),
        Fetch(Key(2**31, 0, 0), 0),
        Fetch(Key(0, 0, 2**63), 0),
        Want(KEY, 2, 0, (), (0,)),
        Want(KEY, -1, 0, (), (0,)),
        Want(KEY, 0, 0, (2**16,), (0,)),
        Want(KEY, 0, 0, (-1,), (0,)),
        Want(KEY, 0, 0, (), (0, -1)),
        Want(KEY, 0, 0, (), (0,) * (LONG + 1)),
        Promise(1, 2**53),
        Promise(-1, 0),
        Done(-1),
        Beat(0, -2, 0, 0.0, 0.0),
        Epoch(1, 1, (-1,), (), ()),
        Gone((2**31,)),
        head(to=(0, -2)),
        Hello("run", "x" * (LONG + 1), "1", 0, "life"),
        Leave("x" * LONG),
        Leave("\ud800"),
        head(signals=tuple((f"{number:04}" + "x" * 60, 1.0) for number in range(LONG - 1))),
    ],
)
def test_numbers_texts_and_lists_out_of_range_are_refused(message: Any) -> None:
    with pytest.raises(BadMessage):
        read(forged(message))


def test_frames_are_not_longer_than_a_chunk_of_the_widest_codec_needs_and_records_much_shorter() -> None:
    place = Bulk(KEY, 0, 0, (), 0, b"")
    room = MOST - len(whole(place))
    assert read(whole(Bulk(KEY, 0, 0, (), 0, bytes(room))))
    with pytest.raises(BadMessage, match="bytes are no message"):
        read(whole(Bulk(KEY, 0, 0, (), 0, bytes(room + 1))))
    with pytest.raises(BadMessage, match="bytes are no record"):
        read(sealed(0, b" " * (MOST_RECORD + 1)))


def test_a_number_that_a_part_gives_as_another_kind_arrives_as_what_the_field_says() -> None:
    sent = head(weight=3, norm=2, signals=(("speed", 1),))
    assert read(whole(sent)) == head(weight=3.0, norm=2.0, signals=(("speed", 1.0),))
    assert whole(sent) == forged(head(weight=3.0, norm=2.0, signals=(("speed", 1.0),)))


def test_noise_is_never_taken_for_a_message() -> None:
    corpus = [whole(Bulk(KEY, 1, 0, (1,), 0, bytes(range(200))))]
    corpus += [whole(Committed(KEY, (0, 1, 2), (0, 1), "a9" * 32, False))]
    corpus += [whole(Hello("run", "print", "1", 0, "life")), whole(Beat(5, 1, 10, 0.1, 2.0))]
    corpus += [whole(Want(KEY, 0, 0, (1,), (0, 1))), whole(Epoch(1, 2, (0, 1), (2,), (0,)))]
    assert accepted(corpus, 0, 20_000) == []


@pytest.mark.parametrize("strategy", [DILOCO, STREAMING])
def test_a_run_comes_to_the_same_bits_whatever_members_and_strangers_say_beside_it(
    strategy: Strategy, tmp_path: Path
) -> None:
    storm = Storm(tmp_path, strategy, seed=0)
    storm.blow(5_000)
    assert storm.same() == [True] * WORKERS
    assert (storm.errors, storm.waited, storm.wrong) == ([], [], [])
    assert min(storm.counts[kind] for kind in ("noise", "harmless", "strangers")) > 500
    assert storm.most["coordinator"] < 2_000
    assert storm.most["island"] < 200_000


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("strategy", [DILOCO, STREAMING])
def test_a_member_that_lies_meets_no_defect_of_anybody(strategy: Strategy, seed: int, tmp_path: Path) -> None:
    storm = Storm(tmp_path, strategy, seed, lies=True)
    storm.blow(2_000)
    assert (storm.hung, storm.wrong) == ([], [])
    told = ("GroupError: ", "LeftBehind: ", "OutOfReach: ")
    assert not [error for error in storm.errors if "failed with" in error or not error.startswith(told)]
