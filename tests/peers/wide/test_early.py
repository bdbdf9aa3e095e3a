"""Messages of exchanges that have not begun."""

from atoll.peers.wide import early
from atoll.peers.wide.early import Early
from atoll.peers.wide.messages import Have, Head
from atoll.wire import Key


def head(round_: int, text: str = "") -> Head:
    return Head(Key(0, 0, round_), (0, 1), 1.0, 1.0, (), text)


def test_what_came_is_taken_in_order_and_once_whatever_was_said_again() -> None:
    kept = Early()
    have = Have(Key(0, 0, 1), 0, "a", all=False)
    for _ in range(2):
        kept.put(1, Key(0, 0, 1), head(1))
        kept.put(2, Key(0, 0, 1), have)
        kept.put(1, Key(0, 0, 2), head(2))
    assert kept.take(Key(0, 0, 1)) == [(1, head(1)), (2, have)]
    assert kept.take(Key(0, 0, 1)) == []
    assert kept.take(Key(0, 0, 2)) == [(1, head(2))]


def test_the_oldest_go_when_there_are_too_many() -> None:
    kept = Early()
    for round_ in range(early.MESSAGES + 10):
        kept.put(1, Key(0, 0, round_), head(round_))
    taken = [round_ for round_ in range(early.MESSAGES + 10) if kept.take(Key(0, 0, round_))]
    assert taken == list(range(10, early.MESSAGES + 10))


def test_the_oldest_go_when_they_are_too_long() -> None:
    """Of a member that says as much as a record may hold, again and again."""
    kept, text = Early(), "x" * (1 << 16)
    for round_ in range(2000):
        kept.put(1, Key(0, 0, round_), head(round_, text))
    taken = [round_ for round_ in range(2000) if kept.take(Key(0, 0, round_))]
    assert taken == list(range(2000 - len(taken), 2000))
    assert 0.9 < len(taken) * len(text) / early.CHARACTERS < 1
