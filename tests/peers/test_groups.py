"""Every group against one conformance suite, and what only some of them can show: deaths, aborts, lanes, launches."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from atoll.errors import GroupError, UsageError
from atoll.peers.memory import Hub
from atoll.peers.torchdist import TorchGroup
from atoll.sync.drive import perform, take_turns
from atoll.sync.flow import Flow
from atoll.testing.exchanges import Case, Member
from atoll.testing.groups import Advance, check_peer_group, in_threads
from atoll.testing.processes import Died, gloo, launch
from atoll.wire import KEEPER, Keep, Landed, PeerGroup, Snapshot, Take


def memory(members: int) -> AbstractContextManager[Sequence[PeerGroup]]:
    hub = Hub(members)
    return nullcontext([hub.group(worker) for worker in range(members)])


@pytest.mark.parametrize("advance", [take_turns, in_threads])
def test_a_memory_group_does_what_a_group_must(advance: Advance) -> None:
    check_peer_group(memory, advance=advance)


def over_gloo(
    rank: int, folder: Path, device: str = "cpu"
) -> Callable[[int], AbstractContextManager[Sequence[PeerGroup]]]:
    """Fresh groups of this process and the first of its fellows, met at numbered files."""
    numbers = count()

    @contextmanager
    def make(members: int) -> Generator[Sequence[PeerGroup]]:
        meeting = folder / str(next(numbers))
        if rank >= members:
            yield []
            return
        with gloo(rank, members, meeting), closing(TorchGroup(device=device, timeout=timedelta(seconds=30))) as group:
            yield [group]

    return make


def conform(rank: int, folder: Path) -> None:
    check_peer_group(over_gloo(rank, folder), members=(2, 3, 5))


def test_a_torch_group_over_gloo_does_what_a_group_must(tmp_path: Path) -> None:
    launch(conform, 5, tmp_path, timeout=110)


def conform_on_gpus(rank: int, folder: Path) -> None:
    torch.cuda.set_device(rank)
    make = over_gloo(rank, folder, device="cuda")
    check_peer_group(make, members=(torch.cuda.device_count(),))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs")
def test_a_torch_group_over_nccl_does_what_a_group_must(tmp_path: Path) -> None:
    launch(conform_on_gpus, torch.cuda.device_count(), tmp_path, timeout=300)


# Death, silence, abort


def raised(act: Callable[[], object]) -> tuple[str, float]:
    """The sentence of the `GroupError` that `act` must raise, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(GroupError) as caught:
        act()
    return str(caught.value), time.monotonic() - began


def meet_one_who_dies(rank: int, folder: Path) -> tuple[str, float, str]:
    with gloo(rank, 3, folder / "meeting"), closing(TorchGroup(timeout=timedelta(seconds=20))) as group:
        group.agree("same")
        member = Member(group.membership, 0)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        ticket = group.post(member.post(Case(1000, overlapped=True))[0])
        sentence, seconds = raised(lambda: group.take(Take(ticket)))
        later, _ = raised(lambda: group.post(member.post(Case(1000))[0]))
        return sentence, seconds, later


def test_a_rank_that_is_killed_makes_the_others_fail_at_once_with_a_sentence(tmp_path: Path) -> None:
    *survivors, dead = launch(meet_one_who_dies, 3, tmp_path)
    assert dead == Died(-signal.SIGKILL)
    for sentence, seconds, later in survivors:
        assert "worker" in sentence
        assert "has gone" in sentence
        assert seconds < 10
        assert later == sentence


def meet_one_who_is_silent(rank: int, folder: Path) -> str:
    with gloo(rank, 2, folder / "meeting"), closing(TorchGroup(timeout=timedelta(seconds=1))) as group:
        if rank == 1:
            while not (folder / "over").exists():
                time.sleep(0.05)
            return ""
        ticket = group.post(Member(group.membership, 0).post(Case(1000, overlapped=True))[0])
        sentence, seconds = raised(lambda: group.take(Take(ticket)))
        (folder / "over").touch()
        assert 0.9 < seconds < 5
        return sentence


def test_a_rank_that_is_silent_makes_the_others_fail_after_the_timeout(tmp_path: Path) -> None:
    sentence, _ = launch(meet_one_who_is_silent, 2, tmp_path)
    assert "worker 1 did not answer within 1 s" in sentence


def leave_by_an_exception(rank: int, folder: Path) -> tuple[str, float]:
    with gloo(rank, 2, folder / "meeting"):
        group = TorchGroup(timeout=timedelta(seconds=50))
        if rank == 1:
            sentence, seconds = raised(lambda: group.agree("same"))
            group.close()
            return sentence, seconds
        ticket = group.post(Member(group.membership, 0).post(Case(1000, overlapped=True))[0])
        began = time.monotonic()
        assert group.take(Take(ticket), wait=False) is None
        group.abort()
        sentence, _ = raised(lambda: group.take(Take(ticket)))
        seconds = time.monotonic() - began
        group.close()
        return sentence, seconds


def test_an_abort_ends_its_own_process_within_a_second_and_then_the_others(tmp_path: Path) -> None:
    # rank 1 comes to another meeting than rank 0, so neither gets what it waits for
    (mine, seconds), (others, until) = launch(leave_by_an_exception, 2, tmp_path, timeout=20)
    assert "worker 0 aborted" in mine
    assert seconds < 1
    assert "worker 0 has gone" in others
    assert until < 10


def fail_in_a_sink(rank: int, folder: Path) -> tuple[str, str]:
    with gloo(rank, 1, folder / "meeting"), closing(TorchGroup()) as group:
        member = Member(group.membership, 0)

        def sink(landed: Landed, start: int, mean: torch.Tensor) -> None:
            raise ZeroDivisionError("no way")

        ticket = group.post(member.post(Case(1000))[0])
        sentence, _ = raised(lambda: group.take(Take(ticket, sink)))
        later, _ = raised(lambda: group.take(Take(ticket, sink)))
        return sentence, later


def test_an_error_in_the_groups_thread_reaches_this_take_and_every_later_one(tmp_path: Path) -> None:
    ((sentence, later),) = launch(fail_in_a_sink, 1, tmp_path)
    assert "ZeroDivisionError: no way" in sentence
    assert later == sentence


# Looks, keepers


def look_until_the_other_comes(rank: int, folder: Path) -> int:
    """How often this rank looked in vain; rank 1 comes only when rank 0 has."""
    with gloo(rank, 2, folder / "meeting"), closing(TorchGroup(timeout=timedelta(seconds=20))) as group:
        post, source = Member(group.membership, 0).post(Case(1000, overlapped=True))
        looks = 0
        while rank == 1 and not (folder / "looked").exists():
            time.sleep(0.01)
        group.post(post)
        while perform(Take(post.key, poll=True), group, wait=True) is None:
            (folder / "looked").touch()
            looks += 1
            time.sleep(0.01)
        assert isinstance(source, Snapshot)
        assert torch.equal(source.tree.flat, Case(1000).mean((0, 1)))
        return looks


def test_a_look_waits_for_nobody(tmp_path: Path) -> None:
    looks, _ = launch(look_until_the_other_comes, 2, tmp_path)
    assert looks > 0


def hand_in(rank: int, folder: Path) -> None:
    with gloo(rank, 1, folder / "meeting"), closing(TorchGroup()) as group:
        post, _ = Member(group.membership, 0).post(Case(3, Keep(), overlapped=True), (KEEPER,))
        with pytest.raises(UsageError, match="a keeper needs all workers in one process here; run without torchrun"):
            group.post(post)


def test_a_message_to_a_keeper_is_refused_with_a_sentence(tmp_path: Path) -> None:
    launch(hand_in, 1, tmp_path)


# What members may differ in


def differ(rank: int, folder: Path) -> list[str]:
    """The sentences of exchanges to which the two members come with something different."""
    sentences: list[str] = []
    cases = [
        Case(10, signals={"speed": 1.0} if rank else {"distance": 1.0}),
        Case(10, signals={"speed": 1.0} if rank else {}),
        Case(10 + rank),
        Case(10, dtype=torch.float64 if rank else torch.float32),
    ]
    for index, case in enumerate([*cases, Case(10)]):
        with gloo(rank, 2, folder / str(index)), closing(TorchGroup(timeout=timedelta(seconds=20))) as group:
            member = Member(group.membership, 0)
            if index == len(cases):
                member.round = 5 + rank
            post, _ = member.post(case)
            group.post(post)
            sentences.append(raised(lambda group=group, post=post: group.take(Take(post.key)))[0])
    return sentences


def test_members_that_differ_in_signals_elements_or_round_are_told_so(tmp_path: Path) -> None:
    for named, unnamed, sizes, widths, rounds in launch(differ, 2, tmp_path):
        assert_holds(named, "gave 1", "as many by other names")
        assert_holds(unnamed, "gave 0", "gave 1")
        assert_holds(sizes, "10", "11", "same model")
        assert_holds(widths, "4", "8", "same model")
        assert_holds(rounds, "round=5", "round=6")


def assert_holds(sentence: str, *parts: str) -> None:
    for part in parts:
        assert part in sentence


def send_many_signals(rank: int, folder: Path) -> None:
    with gloo(rank, 1, folder / "meeting"), closing(TorchGroup()) as group:
        post, _ = Member(group.membership, 0).post(Case(3, signals={f"s{index}": 0.0 for index in range(40)}))
        group.post(post)
        with pytest.raises(UsageError, match="40 signals"):
            group.take(Take(post.key))


def test_more_signals_than_fit_a_header_are_refused_with_a_sentence(tmp_path: Path) -> None:
    launch(send_many_signals, 1, tmp_path)


# Lanes


def in_lanes(rank: int, folder: Path) -> None:
    """Three islands of two lanes; lane 1 has other values and more of them."""
    with gloo(rank, 6, folder / "meeting"), closing(TorchGroup(lanes=2)) as group:
        me, lane = group.membership.me, group.membership.lane
        assert group.membership.workers == (0, 1, 2)
        assert (me, lane, group.membership.lanes) == (rank // 2, rank % 2, 2)
        group.agree(f"lane {lane}")
        member = Member(group.membership, 0)
        good = Case(100 + lane, signals={"speed": 10.0 * lane})
        bad = Case(200 + lane, scale={1: float("nan")} if lane else {})

        def script() -> Flow:
            outcome, mean = yield from member.exchange(good)
            assert isinstance(outcome, Landed)
            assert torch.equal(mean, good.mean((0, 1, 2)))
            squares = [
                sum(Case(100 + each).values(worker).square().sum().item() for each in (0, 1)) for worker in (0, 1, 2)
            ]
            assert outcome.norms == pytest.approx([square**0.5 for square in squares], rel=1e-5)
            assert outcome.signals == {"speed": 1.0}, "lane 0 speaks for its island"
            outcome, mean = yield from member.exchange(bad)
            assert isinstance(outcome, Landed)
            assert outcome.peers == (0, 2), "what one lane cannot use, none of its island's lanes may use"
            assert torch.equal(mean, bad.mean((0, 2)))
            return []

        in_threads([script()], [group])


def test_lane_i_meets_lane_i_and_what_counts_is_decided_for_the_whole_island(tmp_path: Path) -> None:
    launch(in_lanes, 6, tmp_path)


# Launches


def connected(rank: int, ranks: int, port: int) -> str:
    environment = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()})
    with TorchGroup.connect(timeout=timedelta(seconds=5)) as group:
        group.agree("same")
        assert group.membership.workers == tuple(range(ranks))
    assert not dist.is_initialized()
    assert not [thread for thread in threading.enumerate() if thread.name == "atoll-peers"]
    return "left nothing"


def test_a_group_connects_by_torchruns_environment_and_leaves_nothing_behind() -> None:
    assert launch(connected, 2, 2, free_port()) == ["left nothing"] * 2


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def refused(rank: int, lanes: int, environment: dict[str, str]) -> str:
    os.environ.update(environment)
    try:
        with TorchGroup.connect(lanes, timeout=timedelta(seconds=1)):
            return "connected"
    except (UsageError, GroupError) as error:
        return f"{type(error).__name__}: {error}"


def test_a_launch_that_cannot_work_is_refused_with_a_sentence() -> None:
    port = free_port()
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = str(taken.getsockname()[1])
        cases = {
            "UsageError: this process was not started by torchrun: RANK, WORLD_SIZE": (1, {}),
            "UsageError: 2 ranks were to form islands of 3": (3, torchrun),
            f"UsageError: port {busy} of 127.0.0.1 is taken": (1, torchrun | {"MASTER_PORT": busy}),
            f"GroupError: the 2 ranks did not all meet at 127.0.0.1:{port} within 1 s": (1, torchrun),
        }
        for start, (lanes, environment) in cases.items():
            (sentence,) = launch(refused, 1, lanes, environment)
            assert sentence.startswith(start)
