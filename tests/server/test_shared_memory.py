"""Memory that two processes of one machine share: frames are whole, slots come back, nothing is taken that could harm."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.server import Init, Rule, Servers, Table, connect
from echelon.server.protocol import shared_memory, wire


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of one TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        with one, other:
            yield one, other


def both() -> tuple[shared_memory.SharedMemoryChannel, shared_memory.SharedMemoryChannel]:
    """What the two ends of one connection have."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        made = shared_memory.make_offer(one)
        assert made is not None
        taken = shared_memory.accept_offer(said(made.frame))
        assert taken is not None
        mine = made.on_reply({"taken": True})
        assert mine is not None
        return mine, taken


def said(buffers: list[wire.Buffer]) -> dict[str, Any]:
    """What a frame says."""
    return wire.parse(wire.join_buffers(buffers)).meta


def framed(count: int, value: int = 7) -> list[wire.Buffer]:
    """A frame of so many numbers."""
    return wire.encode(wire.PUSH, 3, {"seq": value}, [np.arange(4, dtype=np.uint16), np.full(count, value, np.int64)])


def test_a_frame_is_read_where_it_lies_and_its_room_comes_back_with_the_last_view() -> None:
    one, other = both()
    for turn in range(100):
        note = one.publish(framed(300_000, turn))
        assert note is not None, turn
        frame = other.resolve(said(note))
        assert (frame.kind, frame.request_id, frame.meta) == (wire.PUSH, 3, {"seq": turn})
        kept = frame.arrays[1][10:20]
        assert one.publish(framed(300_000)) is None  # 2.4 of 4 MiB: no room for two
        del frame
        assert one.publish(framed(300_000)) is None, "a view is left"
        assert (kept == turn).all()
        del kept
    assert other.publish(framed(300_000)) is not None, "each end has a half of its own"


def test_short_frames_and_those_longer_than_the_memory_go_by_the_socket() -> None:
    one, _ = both()
    assert one.publish(framed(100)) is None
    assert one.publish(framed(shared_memory.BYTES_PER_DIRECTION // 8)) is None
    assert one.publish(framed(shared_memory.MIN_FRAME_BYTES // 8)) is not None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(4096, 200_000), st.integers(0, 40)), max_size=60))
def test_what_is_lent_never_lies_over_what_is_still_looked_at(steps: list[tuple[int, int]]) -> None:
    """Each step lends a frame and lets go of one of those that are held."""
    one, other = both()
    held: list[wire.Frame] = []
    for number, (count, drop) in enumerate(steps):
        note = one.publish(framed(count, number))
        if note is not None:
            held.append(other.resolve(said(note)))
        else:
            assert held, "all room is free"
        if drop < len(held):
            del held[drop]
        assert all((frame.arrays[1] == frame.meta["seq"]).all() for frame in held)


def test_only_memory_that_cannot_shrink_and_holds_the_token_is_taken(pair: tuple[socket.socket, socket.socket]) -> None:
    made = shared_memory.make_offer(pair[0])
    assert made is not None
    good = said(made.frame)
    size = os.fstat(good["handle"]).st_size
    loose = os.memfd_create("loose", os.MFD_CLOEXEC)
    os.ftruncate(loose, size)
    os.pwrite(loose, bytes.fromhex(good["token"]), 0)
    reader, writer = os.pipe()
    try:
        for wrong in (
            {"token": "00" * 32},
            {"token": "ä"},
            {"handle": loose},
            {"handle": reader},
            {"handle": 10**6},
            {"handle": -1},
            {"pid": 10**9},
            {"pid": -1},
        ):
            assert shared_memory.accept_offer(good | wrong) is None, wrong
        for garbage in ({"pid": "../../etc"}, {"handle": 1.5}, {"token": None}):
            with pytest.raises(wire.WireError):
                shared_memory.accept_offer(good | garbage)
        assert shared_memory.accept_offer(good) is not None
    finally:
        for handle in (loose, reader, writer):
            os.close(handle)
        made.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"at": -64}, {"at": 1}, {"at": shared_memory.BYTES_PER_DIRECTION}, {"size": 0}, {"size": shared_memory.BYTES_PER_DIRECTION + 1}, {"slot": shared_memory.SLOTS_PER_DIRECTION}, {"slot": -1},
        {"turn": 0}, {"turn": 1 << 62}, {"at": None}, {"size": 40.0}, {"slot": True}, {"size": 65_600},
    ],
    ids=str,
)  # fmt: skip
def test_a_note_of_what_was_not_lent_ends_the_connection(wrong: dict[str, Any]) -> None:
    one, other = both()
    note = one.publish(framed(8192))
    assert note is not None
    with pytest.raises(wire.WireError):
        other.resolve(said(note) | wrong)


def test_nothing_is_offered_to_another_machine() -> None:
    class Far:
        def getpeername(self) -> tuple[str, int]:
            return "10.0.0.2", 1

        def getsockname(self) -> tuple[str, int]:
            return "10.0.0.1", 2

    assert shared_memory.make_offer(Far()) is None  # type: ignore[arg-type]


@pytest.mark.slow
def test_workers_and_servers_of_one_machine_share_memory_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, ones = np.arange(3000), np.ones((3000, 64), np.float32)
    with Servers(2, replicas=2, shards=16) as servers, connect(servers.address, secret=servers.secret) as client:
        client.declare(Table(name="t", dim=64, rule=Rule(kind="sgd", lr=1.0), init=Init(kind="zeros")))
        client.push({"t": (ids, ones)})
        client.flush()
        # With its worker, with the replica that it calls, and with the one that calls it.
        for child in servers.servers.values():
            assert Path(f"/proc/{child.pid}/maps").read_text().count("/memfd:echelon") == 3
        monkeypatch.setattr(shared_memory, "MIN_FRAME_BYTES", 1 << 40)  # this worker's by the socket from here on
        client.push({"t": (ids, ones)})
        assert (client.pull({"t": ids})["t"] == -2).all()
        client.flush()
        assert all(len(set(each.values())) == 1 for each in client.digests().values())


def test_a_forked_child_gives_nothing_back() -> None:
    one, other = both()
    note = one.publish(framed(300_000))
    assert note is not None
    frame = other.resolve(said(note))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
        child = os.fork()
    if not child:
        del frame
        os._exit(0)
    os.waitpid(child, 0)
    assert one.publish(framed(300_000)) is None
    assert (frame.arrays[1] == 7).all()


def test_a_note_is_good_once() -> None:
    one, other = both()
    note = one.publish(framed(8192))
    assert note is not None
    other.resolve(said(note))
    with pytest.raises(wire.WireError, match="turn 1 of slot 0 after 1"):
        other.resolve(said(note))
