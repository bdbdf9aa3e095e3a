"""The thread that does a group's work: in order, with the asker's thread count, and loud when it fails."""

import threading
import time

import pytest
import torch

from atoll.errors import GroupError, UsageError
from atoll.peers.background import Background


def test_jobs_are_done_in_order_by_one_other_thread() -> None:
    background = Background("test")
    answers = [background.run(lambda index=index: (index, threading.current_thread().name)) for index in range(20)]
    assert [answer.result() for answer in answers] == [(index, "test") for index in range(20)]
    background.close()


def test_a_job_has_the_intra_op_thread_count_of_the_thread_that_asked() -> None:
    """torch keeps a count per thread, and it decides where a long sum is split."""
    background, before = Background("test"), torch.get_num_threads()
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            norm = torch.linalg.vector_norm(values)
            assert background.run(torch.get_num_threads).result() == threads
            assert torch.equal(background.run(lambda: torch.linalg.vector_norm(values)).result(), norm)
    finally:
        torch.set_num_threads(before)
        background.close()


def test_the_first_error_answers_what_waits_and_what_comes() -> None:
    background, gate = Background("test"), threading.Event()

    def fail() -> None:
        gate.wait()
        raise KeyError("lost")

    failing, waiting = background.run(fail), background.run(lambda: "never done")
    gate.set()
    for answer in (failing, waiting):
        with pytest.raises(GroupError, match="KeyError: 'lost'") as caught:
            answer.result(timeout=5)
        assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(GroupError, match="lost"):
        background.run(lambda: None)
    background.close()


def test_an_error_of_our_own_tree_comes_through_as_it_is() -> None:
    background = Background("test")

    def fail() -> None:
        raise UsageError("give less")

    with pytest.raises(UsageError, match="give less"):
        background.run(fail).result(timeout=5)
    background.close()


def test_failing_from_outside_wakes_whoever_waits_although_the_job_hangs() -> None:
    background, gate = Background("test"), threading.Event()
    hanging = background.run(gate.wait)
    threading.Timer(0.1, lambda: background.fail(GroupError("aborted"))).start()
    began = time.monotonic()
    with pytest.raises(GroupError, match="aborted"):
        hanging.result(timeout=5)
    background.close()
    assert time.monotonic() - began < 2
    gate.set()


def test_closing_finishes_what_was_asked_for() -> None:
    background, done = Background("test"), list[int]()
    for index in range(3):
        background.run(lambda index=index: (time.sleep(0.01), done.append(index)))
    background.close()
    assert done == [0, 1, 2]
