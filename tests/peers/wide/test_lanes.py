"""The end of a transfer, which TLS keeps until something more is written."""

import threading
import time
from collections.abc import Sequence

import pytest

from atoll.peers.wide import lanes
from atoll.peers.wide.lanes import LARGE, NUDGES_S, Lane, Part, Way

WAY = Way(0, direct=True)


class Taken:
    """What a lane hands over, and when: seconds since it was made."""

    def __init__(self, full_s: float) -> None:
        self.began, self.full_s = time.monotonic(), full_s
        self.frames: list[tuple[float, int]] = []

    def __call__(self, way: Way, origin: int, parts: Sequence[Part]) -> None:
        self.frames.append((time.monotonic() - self.began, sum(map(len, parts))))

    def full(self) -> bool:
        """Whether the system holds bytes that it has not sent."""
        return time.monotonic() - self.began < self.full_s


def sent(size: int, full_s: float, seconds: float) -> list[tuple[float, int]]:
    taken = Taken(full_s)
    lane = Lane("lane", taken, WAY, taken.full)
    lane.put(0, [bytes(size)])
    time.sleep(seconds)
    lane.close()
    lane.thread.join()
    return taken.frames


def test_empty_frames_follow_each_other_quickly_until_a_full_socket_has_taken_all() -> None:
    frames = sent(LARGE, full_s=0.6, seconds=1.0)
    assert frames[0][1] == LARGE
    assert {size for _, size in frames[1:]} == {0}
    while_full = [moment for moment, _ in frames[1:] if moment < 0.6]
    assert len(while_full) > 0.6 / NUDGES_S[0] / 3
    assert any(0.6 <= moment < 0.75 for moment, _ in frames), "one comes when there is room"


def test_they_end_when_there_is_nothing_to_push() -> None:
    frames = sent(LARGE, full_s=0.0, seconds=sum(NUDGES_S) + 1.0)
    assert len(frames) == 1 + len(NUDGES_S)


def test_a_short_frame_needs_none() -> None:
    assert len(sent(LARGE - 1, full_s=0.0, seconds=0.3)) == 1


def test_a_lane_is_full_until_its_large_frames_have_been_taken() -> None:
    takes = threading.Event()

    def hand_over(way: Way, origin: int, parts: Sequence[Part]) -> None:
        takes.wait(5.0)

    lane = Lane("lane", hand_over, None, lambda: False)
    lane.put(0, [b"a few words"])
    assert not lane.full
    lane.put(0, [bytes(LARGE)])
    assert lane.full, "it waits for a way"
    lane.aim(WAY)
    time.sleep(0.1)
    assert lane.full, "it is not taken yet"
    takes.set()
    time.sleep(0.1)
    assert not lane.full
    assert lane.busy, "lately it was"
    lane.close()
    lane.thread.join()


def test_large_frames_to_who_was_just_seen_wait_for_a_direct_way_and_short_ones_do_not() -> None:
    taken = Taken(full_s=0.0)
    lane = Lane("lane", taken, None, taken.full)
    lane.aim(Way(7, direct=False))
    lane.put(0, [bytes(LARGE - 1)])
    lane.put(0, [bytes(LARGE)])
    time.sleep(0.3)
    assert [size for _, size in taken.frames] == [LARGE - 1]
    lane.aim(Way(7, direct=True))
    time.sleep(0.1)
    assert [size for _, size in taken.frames if size] == [LARGE - 1, LARGE]
    lane.close()
    lane.thread.join()


def test_large_frames_are_passed_on_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MEETING_S", 0.3)
    taken = Taken(full_s=0.0)
    lane = Lane("lane", taken, Way(7, direct=False), taken.full)
    lane.put(0, [bytes(LARGE)])
    time.sleep(0.8)
    assert 0.3 <= taken.frames[0][0] < 0.6
    assert taken.frames[0][1] == LARGE
    lane.close()
    lane.thread.join()
