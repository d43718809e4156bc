"""A worker's own reader: answers in any pieces, straight into their destinations, from a listener that proved itself."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from echelon.server.client.connection import Request, ServerConnection
from echelon.server.protocol import wire
from echelon.server.protocol.auth import ListenerHandshake, make_secret

SECRET = make_secret()


class Ends:
    """A line, and what it is connected to."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.line = ServerConnection("s1", f"127.0.0.1:{listener.getsockname()[1]}", SECRET)
            self.server, _ = listener.accept()
        door = ListenerHandshake(SECRET)
        while not door.done:
            self.line.write()
            self.server.sendall(door.feed(self.server.recv(door.bytes_needed, socket.MSG_WAITALL)))
            if not self.line.is_ready:
                self.turn(lambda: self.line.is_ready)
        assert wire.receive(self.server).kind == wire.SHM_OFFER
        self.server.sendall(b"".join(wire.encode(wire.SHM_OFFER_REPLY, 0, {"taken": False})))

    def turn(self, done: object) -> None:
        """Read until it is so."""
        deadline = time.monotonic() + 10
        while not done():  # type: ignore[operator]
            self.line.read()
            assert time.monotonic() < deadline


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    both = Ends()
    yield both
    both.line.close()
    both.server.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, 300, 4096, 20_000, 90_000]), max_size=5),
    cuts=st.lists(st.integers(1, 40_000), max_size=4),
    placed=st.lists(st.booleans(), min_size=5, max_size=5),
)
@example(sizes=[20_000, 0], cuts=[], placed=[True] * 5)
@example(sizes=[20_000, 0, 7, 0], cuts=[10_000, 9_000], placed=[True, False] * 2 + [True])
def test_an_answer_in_any_pieces_goes_where_it_belongs(
    ends: Ends, sizes: list[int], cuts: list[int], placed: list[bool]
) -> None:
    sent = [np.arange(size, dtype="f4") + place for place, size in enumerate(sizes)]
    targets = [np.zeros(size, "f4") if place else None for size, place in zip(sizes, placed, strict=False)]
    got: list[wire.Frame] = []
    ends.line.send_request(
        Request(wire.PULL, {}, [], lambda request, frame: got.append(frame), lambda meta, described: targets)
    )
    asked = wire.receive(ends.server)
    data = b"".join(wire.encode(wire.ROWS, asked.request_id, {"counts": [1]}, sent))
    for cut in cuts:
        ends.server.sendall(data[:cut])
        data = data[cut:]
        ends.line.read()
    ends.server.sendall(data)
    ends.turn(lambda: got)
    assert [each.tolist() for each in got[0].arrays] == [each.tolist() for each in sent]
    assert got[0].meta == {"counts": [1]}
    long = len(data) > 1 << 14 and not cuts
    for target, frame, want in zip(targets, got[0].arrays, sent, strict=True):
        assert target is None or not long or not want.size or (frame is target and (target == want).all())


def test_a_long_answer_on_its_way_is_a_way_on(ends: Ends) -> None:
    """By this a call that lasts is told from one that is stuck."""
    got: list[wire.Frame] = []
    ends.line.send_request(Request(wire.PULL, {}, [], lambda request, frame: got.append(frame)))
    asked = wire.receive(ends.server)
    data = b"".join(wire.encode(wire.ROWS, asked.request_id, {}, [np.arange(100_000)]))
    seen = [ends.line.chunks_received]
    for start in range(0, len(data), 200_000):
        ends.server.sendall(data[start : start + 200_000])
        deadline = time.monotonic() + 10
        while ends.line.chunks_received == seen[-1] and not got:
            ends.line.read()
            assert time.monotonic() < deadline
        seen.append(ends.line.chunks_received)
    ends.turn(lambda: got)
    assert len(set(seen)) >= 5


def test_who_is_interrupted_gets_no_frame_twice(ends: Ends) -> None:
    got: list[int] = []

    def interrupted(request: Request, frame: wire.Frame) -> None:
        got.append(frame.meta["n"])
        if frame.meta["n"] == 1:
            raise KeyboardInterrupt

    numbers = []
    for _ in range(3):
        ends.line.send_request(Request(wire.PULL, {}, [], interrupted))
        numbers.append(wire.receive(ends.server).request_id)
    for place, number in enumerate(numbers):
        ends.server.sendall(b"".join(wire.encode(wire.ROWS, number, {"n": place + 1})))
    time.sleep(0.1)
    with pytest.raises(KeyboardInterrupt):
        ends.turn(lambda: got)
    ends.line.send_request(Request(wire.PULL, {}, [], interrupted))
    ends.server.sendall(b"".join(wire.encode(wire.ROWS, wire.receive(ends.server).request_id, {"n": 4})))
    ends.turn(lambda: 4 in got)
    assert got == [1, 2, 3, 4]
