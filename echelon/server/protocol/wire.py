"""The frames of all connections: a header, a JSON object and arrays. Nothing is unpickled.

    header 32 bytes   magic u32, kind u16, flags u16, request u64, meta bytes u32, arrays u16, reserved u16, body bytes u64
    body              meta (JSON object, utf-8), array descriptors (dtype u8, ndim u8, shape u64 each), payloads

Little endian. Each payload starts at a multiple of 64 bytes from the frame's start and the last one ends the frame, so a received frame
can be read in place, forwarded as it is, and nested in another frame as an array of bytes.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from echelon.errors import ServerError

# Worker -> head of a route, and the replies.
PULL, ROWS, PUSH, ACK, CHANGED, CLOCK, CLOCK_REPLY, DIGEST, DIGEST_REPLY, STALE_MAP, REFUSED = range(1, 12)
# Any two processes on one machine: see shared_memory.py.
SHM_OFFER, SHM_OFFER_REPLY, SHM_REF = range(12, 15)
# Head -> other replicas of a shard, and the replies.
HELLO, HELLO_REPLY, LOG_ENTRY, REPLICA_ACK, LOG_STATE, LOG_STATE_REPLY, SNAPSHOT, HEARTBEAT, MAP_REQUEST = range(20, 29)
# Entries of the head itself, inside LOG_ENTRY.
COMMIT_STEP, ADD_WORKER, FORGET_WORKERS = range(30, 33)
# Any process <-> controller.
JOIN, MAP, MAP_UPDATE, MAP_INSTALLED, WATCH, DECLARE, CAUGHT_UP, HANDOVER, DRAINED, LEAVE = range(40, 50)
DRAIN, CHECKPOINT, CHECKPOINT_WRITTEN, EXPIRE, STATUS, STATUS_REPLY, DONE, RESTORE_FAILED = range(50, 58)

KIND_NAMES = {value: name for name, value in list(globals().items()) if name.isupper() and type(value) is int}

MAGIC = 0x4E4C4845  # "EHLN"
HEADER = struct.Struct("<IHHQIHHQ")
ALIGNMENT = 64
MAX_META_BYTES = 1 << 20
MAX_FRAME_BYTES = 1 << 30
MAX_NDIM = 4
#: Buffers per call of sendmsg: each costs time, and a call sends a few at most.
_BUFFERS_PER_CALL = 16

_DTYPE_NAMES = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")
_CODE_BY_DTYPE = {np.dtype("<" + name): code for code, name in enumerate(_DTYPE_NAMES, start=1)}
_DTYPE_BY_CODE = {code: dtype for dtype, code in _CODE_BY_DTYPE.items()}

#: The largest product of an array's nonzero extents.
_MAX_ELEMENTS = 1 << 40

Buffer = bytes | bytearray | memoryview

_descriptor_structs = [struct.Struct(f"<BB{ndim}Q") for ndim in range(MAX_NDIM + 1)]
_padding = [bytes(count) for count in range(ALIGNMENT)]
_json_decoder: Any = json.JSONDecoder()
_scan_json = _json_decoder.scan_once


def _make_json_encoder() -> Callable[[dict[str, Any]], str]:
    """JSON without spaces. JSONEncoder.encode would create a C encoder per call, which takes longer than encoding a frame's JSON."""
    encoder = json.JSONEncoder(separators=(",", ":"))
    module: Any = json.encoder
    make_encoder = module.c_make_encoder
    if make_encoder is None:
        return encoder.encode
    encode_text = module.encode_basestring_ascii
    encode_chunks = make_encoder(None, encoder.default, encode_text, None, ":", ",", False, False, True)
    return lambda meta: "".join(encode_chunks(meta, 0))


_encode_json = _make_json_encoder()


class WireError(ServerError):
    """Bytes that are no frame: their connection is closed."""


def _frame_error(kind: int, problem: str) -> WireError:
    return WireError(f"frame {KIND_NAMES.get(kind, kind)}: {problem}")


@dataclass(slots=True, eq=False, repr=False)
class Frame:
    """A received frame. `arrays` are views of `raw`, the frame's bytes."""

    kind: int
    request_id: int
    meta: dict[str, Any]
    arrays: list[np.ndarray]
    raw: np.ndarray

    def __repr__(self) -> str:
        return f"{KIND_NAMES.get(self.kind, self.kind)} #{self.request_id} {self.meta} {[array.shape for array in self.arrays]}"


class ChunkedArray:
    """Flat arrays of one dtype that are sent as one array, without joining them first."""

    __slots__ = ("chunks", "dtype", "nbytes", "shape")
    ndim = 1

    def __init__(self, chunks: Sequence[np.ndarray]) -> None:
        self.chunks, self.dtype = chunks, chunks[0].dtype
        self.shape = (sum(map(len, chunks)),)
        self.nbytes = self.shape[0] * self.dtype.itemsize


#: What a frame can carry.
Arrays = Sequence[np.ndarray | ChunkedArray]


def encode(kind: int, request_id: int, meta: dict[str, Any], arrays: Arrays = ()) -> list[Buffer]:
    """A frame as buffers for sendmsg. Contiguous arrays are not copied."""
    text = _encode_json(meta).encode() if meta else b"{}"
    if len(text) > MAX_META_BYTES:
        raise _frame_error(kind, f"{len(text)} bytes of JSON; at most {MAX_META_BYTES}")
    if not arrays:
        return [HEADER.pack(MAGIC, kind, 0, request_id, len(text), 0, 0, len(text)) + text]
    prefix = [text]
    length = HEADER.size + len(text)
    for array in arrays:
        code, ndim = _CODE_BY_DTYPE.get(array.dtype), array.ndim
        if code is None or ndim > MAX_NDIM:
            raise _frame_error(kind, f"{array.dtype} of {ndim} dims cannot be sent")
        prefix.append(_descriptor_structs[ndim].pack(code, ndim, *array.shape))
        length += 2 + 8 * ndim
    buffers: list[Buffer] = []
    for array in arrays:
        padding, nbytes = -length % ALIGNMENT, array.nbytes
        prefix.append(_padding[padding])
        length += padding + nbytes
        if nbytes:
            buffers.append(b"".join(prefix))
            prefix = []
            for chunk in array.chunks if isinstance(array, ChunkedArray) else (array,):
                buffers.append((chunk if chunk.flags.c_contiguous else np.ascontiguousarray(chunk)).data.cast("B"))
    if prefix:
        buffers.append(b"".join(prefix))
    header = HEADER.pack(MAGIC, kind, 0, request_id, len(text), len(arrays), 0, length - HEADER.size)
    buffers[0] = header + buffers[0]
    return buffers


def frame_size(buffers: Iterable[Buffer]) -> int:
    """The length of an encoded frame."""
    return sum(len(buffer) for buffer in buffers)


def join_buffers(buffers: Iterable[Buffer]) -> np.ndarray:
    """An encoded frame as one array of bytes."""
    return np.frombuffer(b"".join(buffers), np.uint8)


def frame_length(header: Buffer, *, limit: int = MAX_FRAME_BYTES) -> int:
    """The length of the frame with this header."""
    magic, kind, _flags, _request_id, meta_length, array_count, reserved, body_length = HEADER.unpack_from(header)
    if magic != MAGIC or reserved:
        raise WireError(f"a header begins with {magic:#010x}; frames begin with {MAGIC:#010x}")
    if meta_length > MAX_META_BYTES or meta_length + 2 * array_count > body_length:
        raise _frame_error(kind, f"{meta_length} bytes of JSON, {array_count} arrays in a body of {body_length} bytes")
    if HEADER.size + body_length > limit:
        raise _frame_error(kind, f"{HEADER.size + body_length} bytes; at most {limit} here")
    return int(HEADER.size + body_length)


def max_prefix_length(header: Buffer) -> int:
    """The most bytes of the body that the JSON and the descriptors can take."""
    _magic, _kind, _flags, _request_id, meta_length, array_count, _reserved, body_length = HEADER.unpack_from(header)
    return int(min(meta_length + array_count * (2 + 8 * MAX_NDIM), body_length))


def parse_prefix(view: memoryview) -> tuple[int, int, dict[str, Any], list[tuple[np.dtype, tuple[int, ...], int]]]:
    """A frame's kind, request id and JSON object, and the dtype, shape and offset of each array, from its first bytes."""
    _magic, kind, _flags, request_id, meta_length, array_count, _reserved, body_length = HEADER.unpack_from(view)
    offset, end = HEADER.size + meta_length, HEADER.size + body_length
    try:
        text = str(view[HEADER.size : offset], "utf-8")
        meta, json_end = _scan_json(text, 0)
    except (ValueError, RecursionError, StopIteration):
        raise _frame_error(kind, "its meta is not JSON") from None
    if not isinstance(meta, dict) or json_end != len(text):
        raise _frame_error(kind, "its meta is not an object")
    descriptors = []
    try:
        for _ in range(array_count):
            ndim = view[offset + 1]
            if ndim > MAX_NDIM or view[offset] not in _DTYPE_BY_CODE:
                raise _frame_error(kind, f"no array has dtype {view[offset]} and {ndim} dims")
            descriptors.append(_descriptor_structs[ndim].unpack_from(view, offset))
            offset += 2 + 8 * ndim
    except (IndexError, struct.error):
        raise _frame_error(kind, "its descriptors are cut off") from None
    layouts = []
    for code, _ndim, *shape in descriptors:
        offset += -offset % ALIGNMENT
        dtype = _DTYPE_BY_CODE[code]
        nbytes, extent_product = dtype.itemsize, 1
        for extent in shape:
            extent_product *= extent or 1
            nbytes *= extent
        if extent_product > _MAX_ELEMENTS:
            raise _frame_error(kind, f"an array of shape {shape}")
        layouts.append((dtype, tuple(shape), offset))
        offset += nbytes
        if offset > end:
            raise _frame_error(kind, f"arrays of more than its {body_length} bytes")
    if offset != end:
        raise _frame_error(kind, f"{end - offset} bytes too many")
    return kind, request_id, meta, layouts


def parse(raw: np.ndarray) -> Frame:
    """The frame that all of these bytes encode."""
    view = raw.data
    if len(view) < HEADER.size or frame_length(view, limit=len(view)) != len(view):
        raise WireError(f"{len(raw)} bytes are not one frame")
    kind, request_id, meta, layouts = parse_prefix(view)
    # An empty array may start behind the last byte, which numpy does not allow.
    arrays = [np.ndarray(shape, dtype, view, offset if offset < len(view) else 0) for dtype, shape, offset in layouts]
    return Frame(kind, request_id, meta, arrays, raw)


class FrameDecoder:
    """Frames from a stream of bytes: receive into `get_buffer()`, then pass the count to `buffer_updated()`."""

    #: Size of the first read; the start of a longer frame is copied out of it.
    BUFFER_BYTES = 1 << 14

    def __init__(self) -> None:
        self._buffer = np.empty(self.BUFFER_BYTES, np.uint8)
        self._buffered = 0
        self._large_frame: np.ndarray | None = None
        self._large_received = 0

    def get_buffer(self) -> memoryview:
        """Where to receive the next bytes."""
        if self._large_frame is not None:
            return self._large_frame.data[self._large_received :]
        return self._buffer.data[self._buffered :]

    def buffer_updated(self, count: int) -> list[Frame]:
        """The frames that are complete after `count` more bytes."""
        if self._large_frame is not None:
            self._large_received += count
            if self._large_received < len(self._large_frame):
                return []
            frame, self._large_frame = parse(self._large_frame), None
            return [frame]
        self._buffered += count
        buffer, offset, frames = self._buffer, 0, []
        while self._buffered - offset >= HEADER.size:
            length = frame_length(buffer[offset : offset + HEADER.size].data)
            available = self._buffered - offset
            if length > available:
                if length > self.BUFFER_BYTES // 2:
                    self._large_frame = np.empty(length, np.uint8)  # memory is committed only as bytes arrive
                    self._large_frame[:available] = buffer[offset : self._buffered]
                    self._large_received, offset = available, self._buffered
                break
            # A copy, because the buffer is overwritten and readers may keep views of the frame.
            frames.append(parse(buffer[offset : offset + length].copy()))
            offset += length
        if offset:
            remaining = self._buffered - offset
            buffer[:remaining] = buffer[offset : self._buffered].copy()
            self._buffered = remaining
        return frames


def send_some(sock: socket.socket, queue: deque[memoryview]) -> int:
    """Send from the front of the queue with one system call. Returns the number of bytes, which have left the queue."""
    sent = remaining = sock.sendmsg(islice(queue, _BUFFERS_PER_CALL))
    while queue and remaining >= len(queue[0]):
        remaining -= len(queue.popleft())
    if remaining:
        queue[0] = queue[0][remaining:]
    return sent


def send(connection: socket.socket, buffers: Sequence[Buffer]) -> None:
    """Send a whole frame over a blocking socket."""
    queue = deque(memoryview(buffer) for buffer in buffers if len(buffer))
    while queue:
        send_some(connection, queue)


def receive(connection: socket.socket) -> Frame:
    """Receive one frame from a blocking socket. EOFError if the stream ends between frames, WireError inside one."""
    header = bytearray(HEADER.size)
    _receive_exactly(connection, memoryview(header), at_frame_start=True)
    raw = np.empty(frame_length(header), np.uint8)
    raw[: HEADER.size] = np.frombuffer(header, np.uint8)
    _receive_exactly(connection, raw.data[HEADER.size :])
    return parse(raw)


def _receive_exactly(connection: socket.socket, view: memoryview, *, at_frame_start: bool = False) -> None:
    while view:
        received = connection.recv_into(view)
        if not received:
            if at_frame_start and len(view) == HEADER.size:
                raise EOFError
            raise WireError("the connection ended inside a frame")
        view, at_frame_start = view[received:], False
