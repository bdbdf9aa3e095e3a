"""What a team says of its boundaries."""

from atoll.train.team import trouble
from atoll.wire import Event, Key, Landed, Launched, Lost


def test_what_others_than_the_first_refuse_or_lose_is_told_once() -> None:
    """Workers 0 and 1 met well; 2 and 3 lost their round, in which 3 was refused; a keeper refused one of two."""
    mine, theirs, kept = Key(0, 0, 4), Key(0, 1, 4), Key(1, 0, 9)
    good = Landed(mine, (0, 1), 1.0)
    lost = Lost(theirs, "worker 3 sent values that are not finite")
    refused = Landed(kept, (0,), 0.5, refused=("worker 1 handed in values that are not finite",))
    ended: dict[int, list[Event]] = {
        0: [Launched(mine, 20), good],
        1: [good],
        2: [Launched(theirs, 20), lost],
        3: [lost],
        4: [refused],
    }
    assert trouble(ended, {mine}) == [lost, refused]
