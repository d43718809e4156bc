"""Frames: what is encoded is decoded, however the stream is cut, and garbage is an error and nothing else."""

from __future__ import annotations

import random
import socket
import threading

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echelon.server.protocol import wire

DTYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]

arrays = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)).map(
        lambda drawn: np.arange(int(np.prod(drawn[1])), dtype=drawn[0]).reshape(drawn[1])
    ),
    max_size=5,
)
metas = st.dictionaries(
    st.text(max_size=8), st.none() | st.integers(-(2**40), 2**40) | st.text(max_size=20), max_size=4
)


def same(frame: wire.Frame, kind: int, request: int, meta: dict, sent: list[np.ndarray]) -> None:
    """A frame is what was sent."""
    assert (frame.kind, frame.request_id, frame.meta) == (kind, request, meta)
    assert len(frame.arrays) == len(sent)
    for got, want in zip(frame.arrays, sent, strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert np.array_equal(got, want)
        assert got.ctypes.data % 8 == 0 or not got.size


def feed(decoder: wire.FrameDecoder, data: bytes | bytearray) -> list[wire.Frame]:
    """The frames that are complete after these bytes."""
    frames: list[wire.Frame] = []
    while data:
        buffer = decoder.get_buffer()
        count = min(len(buffer), len(data))
        buffer[:count], data = data[:count], data[count:]
        frames += decoder.buffer_updated(count)
    return frames


@example({}, [np.zeros(0, "u1")] * 3, random.Random(0))
@given(metas, arrays, st.randoms(use_true_random=False))
def test_any_stream(meta: dict, sent: list[np.ndarray], drawn: random.Random) -> None:
    """Two frames in any cuts of the stream."""
    stream = b"".join(wire.encode(wire.PUSH, 7, meta, sent)) + b"".join(wire.encode(wire.ACK, 2**60, {}))
    decoder, frames = wire.FrameDecoder(), []
    at = 0
    while at < len(stream):
        count = drawn.randint(1, 100)
        frames += feed(decoder, stream[at : at + count])
        at += count
    first, second = frames
    same(first, wire.PUSH, 7, meta, sent)
    same(second, wire.ACK, 2**60, {}, [])


def test_large_frames_keep_their_bytes() -> None:
    """A frame larger than the scratch, between small ones; earlier frames are not written over."""
    large = np.random.default_rng(0).standard_normal((300, 1000)).astype("f4")
    stream = b""
    for number in range(3):
        stream += b"".join(wire.encode(wire.PUSH, number, {"n": number}, [np.full(9, number, "u2"), large + number]))
    decoder, frames = wire.FrameDecoder(), []
    for at in range(0, len(stream), 70_001):
        frames += feed(decoder, stream[at : at + 70_001])
    for number, frame in enumerate(frames):
        same(frame, wire.PUSH, number, {"n": number}, [np.full(9, number, "u2"), large + number])
    assert len(frames) == 3


def test_inside_another() -> None:
    """A frame's bytes travel as an array of another frame, and its arrays are aligned there too."""
    inner = wire.parse(
        wire.join_buffers(wire.encode(wire.PUSH, 5, {"seq": 1}, [np.arange(3, dtype="u2"), np.ones((4, 8), "f8")]))
    )
    outer = wire.parse(wire.join_buffers(wire.encode(wire.LOG_ENTRY, 6, {"link": 1}, [inner.raw])))
    again = wire.parse(outer.arrays[0])
    same(again, wire.PUSH, 5, {"seq": 1}, inner.arrays)


def test_limits() -> None:
    """What is too large is refused by its header alone."""
    header = wire.HEADER.pack(wire.MAGIC, wire.PUSH, 0, 1, 2, 0, 0, 1 << 40)
    with pytest.raises(wire.WireError, match="at most"):
        feed(wire.FrameDecoder(), header)
    with pytest.raises(wire.WireError, match="at most 4096"):
        wire.frame_length(wire.HEADER.pack(wire.MAGIC, wire.PUSH, 0, 1, 2, 0, 0, 4096), limit=4096)
    with pytest.raises(wire.WireError, match="bytes of JSON"):
        feed(wire.FrameDecoder(), wire.HEADER.pack(wire.MAGIC, wire.PUSH, 0, 1, 1 << 21, 0, 0, 1 << 22))
    with pytest.raises(wire.WireError, match="JSON"):
        wire.encode(wire.PUSH, 1, {"x": "y" * (1 << 20)})
    with pytest.raises(wire.WireError, match="cannot be sent"):
        wire.encode(wire.PUSH, 1, {}, [np.array(["text"])])


def test_garbage() -> None:
    """Mutated frames are decoded or refused; nothing else is ever raised."""
    drawn = random.Random(1)
    good = bytearray(
        b"".join(wire.encode(wire.PUSH, 7, {"ops": [{"table": 1}]}, [np.arange(5), np.ones((5, 4), "f4")]))
    )
    refused = 0
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(drawn.randint(1, 4)):
            bad[drawn.randrange(len(bad) if drawn.random() < 0.3 else 80)] = drawn.randrange(256)
        try:
            feed(wire.FrameDecoder(), bad)
        except wire.WireError:
            refused += 1
    assert refused > 1000


def test_sockets() -> None:
    """Blocking ends: many buffers out, one frame in."""
    ours, theirs = socket.socketpair()
    blocks = [np.random.default_rng(n).standard_normal(5000).astype("f4") for n in range(1500)]
    sent = wire.encode(wire.ROWS, 3, {"ops": []}, [np.arange(4, dtype="i8"), *blocks])
    sender = threading.Thread(target=wire.send, args=(ours, sent))
    sender.start()
    frame = wire.receive(theirs)
    sender.join()
    same(frame, wire.ROWS, 3, {"ops": []}, [np.arange(4, dtype="i8"), *blocks])
    ours.close()
    with pytest.raises(EOFError):
        wire.receive(theirs)
    theirs.close()
