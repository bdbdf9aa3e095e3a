"""What is refused at the desk, and what strangers can do to it, over real sockets."""

import socket
import sqlite3
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from atoll.errors import UsageError
from atoll.peers.wide.desk import CALLERS, MAX_REQUEST, Desk, EnrolmentService
from atoll.peers.wide.enrol import enrol
from tests.peers.wide.desks import ENDPOINTS, Start, until


def test_a_port_that_is_taken_and_files_that_are_missing_are_named(start: Start, tmp_path: Path) -> None:
    here = start()
    desk = Desk(here.authority, here.invitations, here.place, ENDPOINTS, here.said.append)
    with pytest.raises(UsageError, match=r"cannot listen there \(Address already in use\); give a free port"):
        EnrolmentService(desk, here.folder, f"127.0.0.1:{here.service.port}")
    with pytest.raises(UsageError, match="give the folder in which the coordinator was started"):
        EnrolmentService(desk, tmp_path, "127.0.0.1:0")


def test_requests_that_are_none_get_a_sentence_and_use_nothing_up(start: Start) -> None:
    here = start()
    none = "what was sent is no request to enrol"
    assert "the island speaks version 2 of enrolment and the coordinator 1" in here.answer(protocol=2)
    assert "certificate request cannot be read" in here.answer(request="garbage")
    for changed in (
        {"protocol": "1"},
        {"name": "x\n forged line"},
        {"name": ["a"]},
        {"secret": "\ud800"},
        {"worker": -1},
        {"worker": 1 << 70},
        {"worker": "1"},
        {"time": float("nan")},
        {"time": 10**400},
        {"time": -1},
        {"request": None},
    ):
        assert none in here.answer(**changed)
    for line in (b"\n", b"[" * (MAX_REQUEST - 1) + b"\n", b'"\xff"\n', b"null\n", b"{}\n", b"1" * 5000 + b"\n"):
        with here.talk() as talk:
            talk.sendall(line)
            assert none in talk.makefile().readline()
    assert here.places == []


def test_an_error_of_the_coordinators_own_reaches_both_sides_and_the_service_lives_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = start()
    made = here.invite().text()

    def locked(*_: object) -> int:
        raise sqlite3.OperationalError("database is locked")

    with monkeypatch.context() as patched:
        patched.setattr(here.invitations, "take", locked)
        with pytest.raises(UsageError, match="met an error of its own"):
            enrol(made, tmp_path / "island")
    assert "OperationalError: database is locked" in here.said[-1]
    assert enrol(made, tmp_path / "island").worker == 0


def test_garbage_oversize_and_half_open_calls_end_with_a_sentence_in_the_log(start: Start) -> None:
    here = start()
    with here.call() as garbage:
        garbage.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: any("did not speak TLS" in line for line in here.said))
    with here.talk() as large:
        large.sendall(b"x" * (MAX_REQUEST + 1))
        until(lambda: any("sent too much" in line for line in here.said))
    with here.talk() as half:
        half.sendall(b'{"protocol"')
    until(lambda: any("hung up" in line for line in here.said))
    with here.call() as reset:
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert here.answer(protocol=2)


def test_a_caller_that_dribbles_is_ended_though_it_never_pauses(start: Start) -> None:
    here, began = start(), time.monotonic()
    with here.talk() as slow, suppress(OSError):
        while time.monotonic() - began < 5:
            slow.sendall(b" ")
            time.sleep(0.05)
    assert time.monotonic() - began < 3
    assert any("did not say all in time" in line for line in here.said)


def test_callers_that_say_nothing_keep_nobody_out_and_bind_no_more_threads(start: Start, tmp_path: Path) -> None:
    here, others = start(), threading.active_count()
    idle: list[socket.socket] = []
    for _ in range(3 * CALLERS):
        idle.append(here.call())
    began = time.monotonic()
    assert enrol(here.invite().text(), tmp_path / "island").worker == 0
    assert time.monotonic() - began < 0.9  # less than the patience after which the idle ones are ended anyway
    assert threading.active_count() - others <= CALLERS
    for each in idle:
        each.close()
    until(lambda: threading.active_count() <= others)


def test_closing_ends_calls_and_frees_the_port(start: Start) -> None:
    here = start()
    port, before = here.service.port, threading.active_count()
    with here.call() as waiting:
        until(lambda: threading.active_count() > before)
        here.service.close()
        assert waiting.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5.0)
