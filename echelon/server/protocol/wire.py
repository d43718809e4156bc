"""The one codec of all connections: frames of a header, a JSON object and arrays. Nothing is unpickled, nothing is guessed.

    header 32 bytes   magic u32, kind u16, flags u16, request u64, meta bytes u32, arrays u16, reserved u16, body bytes u64
    body              meta (JSON object, utf-8), array descriptors (dtype u8, ndim u8, shape u64 each), payloads

Little endian. Each payload begins at a multiple of 64 bytes from the frame's start and the last ends the frame, so that a frame
that was received can be read in place, sent on as it is, and lie inside another frame as an array of bytes.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from echelon.errors import ServerError

# Worker -> head of a route, and the answers.
PULL = 1
ROWS = 2
PUSH = 3
ACK = 4
CHANGED = 5
CLOCK = 6
CLOCK_REPLY = 7
DIGEST = 8
DIGEST_REPLY = 9
STALE_MAP = 10
REFUSED = 11
# Head -> other replicas of a shard, and the answers.
HELLO = 20
HELLO_REPLY = 21
LOG_ENTRY = 22
REPLICA_ACK = 23
LOG_STATE = 24
LOG_STATE_REPLY = 25
SNAPSHOT = 26
HEARTBEAT = 27
MAP_REQUEST = 28
# Any two on one machine: memory that both have, see shared_memory.py.
SHM_OFFER = 12
SHM_OFFER_REPLY = 13
SHM_REF = 14
# Entries of a head's own, inside ENTRY.
COMMIT_STEP = 30
ADD_WORKER = 31
FORGET_WORKERS = 32
# Everybody <-> controller.
JOIN = 40
MAP = 41
MAP_UPDATE = 42
MAP_INSTALLED = 43
WATCH = 44
DECLARE = 45
CAUGHT_UP = 46
HANDOVER = 47
DRAINED = 48
LEAVE = 49
DRAIN = 50
CHECKPOINT = 51
CHECKPOINT_WRITTEN = 52
EXPIRE = 53
STATUS = 54
STATUS_REPLY = 55
DONE = 56
RESTORE_FAILED = 57

KIND_NAMES = {value: name for name, value in list(globals().items()) if name.isupper() and type(value) is int}

MAGIC = 0x4E4C4845  # "EHLN"
HEADER = struct.Struct("<IHHQIHHQ")
ALIGNMENT = 64
MAX_META_BYTES = 1 << 20
MAX_FRAME_BYTES = 1 << 30
MAX_NDIM = 4

_DTYPE_NAMES = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")
_CODE_BY_DTYPE = {np.dtype("<" + name): code for code, name in enumerate(_DTYPE_NAMES, start=1)}
_DTYPE_BY_CODE = {code: dtype for dtype, code in _CODE_BY_DTYPE.items()}

#: Of an array's extents, which may be many where another is zero.
_MAX_ELEMENTS = 1 << 40

Buffer = bytes | bytearray | memoryview

_descriptor_structs = [struct.Struct(f"<BB{ndim}Q") for ndim in range(MAX_NDIM + 1)]
_padding = [bytes(count) for count in range(ALIGNMENT)]
_json_decoder: Any = json.JSONDecoder()
_scan_json = _json_decoder.scan_once


def _make_json_encoder() -> Callable[[dict[str, Any]], str]:
    """JSON without spaces. JSONEncoder.encode makes a new compiled encoder for each call, which takes longer than a frame's JSON."""
    encoder = json.JSONEncoder(separators=(",", ":"))
    module: Any = json.encoder
    make_encoder = module.c_make_encoder
    if make_encoder is None:
        return encoder.encode
    encode_chunks = make_encoder(
        None, encoder.default, module.encode_basestring_ascii, None, ":", ",", False, False, True
    )
    return lambda meta: "".join(encode_chunks(meta, 0))


_encode_json = _make_json_encoder()


class WireError(ServerError):
    """Bytes that are no frame: the connection that they came over is closed."""


class Frame:
    """A frame that was received. `arrays` are views of `raw`, the frame's bytes."""

    __slots__ = ("arrays", "flags", "kind", "meta", "raw", "request_id")

    def __init__(
        self,
        kind: int,
        request_id: int,
        meta: dict[str, Any],
        arrays: list[np.ndarray],
        raw: np.ndarray,
        flags: int = 0,
    ) -> None:
        self.kind, self.request_id, self.meta, self.arrays, self.raw, self.flags = (
            kind,
            request_id,
            meta,
            arrays,
            raw,
            flags,
        )

    def __repr__(self) -> str:
        return f"{KIND_NAMES.get(self.kind, self.kind)} #{self.request_id} {self.meta} {[array.shape for array in self.arrays]}"


class ChunkedArray:
    """Flat arrays of one dtype that travel end to end, as one array: what lies apart is not joined first."""

    __slots__ = ("chunks", "dtype", "nbytes", "shape")
    ndim = 1

    def __init__(self, chunks: Sequence[np.ndarray]) -> None:
        self.chunks, self.dtype = chunks, chunks[0].dtype
        self.shape = (sum(len(piece) for piece in chunks),)
        self.nbytes = self.shape[0] * self.dtype.itemsize


def encode(
    kind: int,
    request_id: int,
    meta: dict[str, Any],
    arrays: Sequence[np.ndarray | ChunkedArray] = (),
    *,
    flags: int = 0,
) -> list[Buffer]:
    """A frame as buffers for sendmsg: arrays are not copied (unless they are not contiguous)."""
    text = _encode_json(meta).encode() if meta else b"{}"
    if len(text) > MAX_META_BYTES:
        raise WireError(f"frame {KIND_NAMES.get(kind, kind)}: {len(text)} bytes of JSON; at most {MAX_META_BYTES}")
    if not arrays:
        return [HEADER.pack(MAGIC, kind, flags, request_id, len(text), 0, 0, len(text)) + text]
    unsent_prefix = [text]
    length = HEADER.size + len(text)
    for array in arrays:
        code, ndim = _CODE_BY_DTYPE.get(array.dtype), array.ndim
        if code is None or ndim > MAX_NDIM:
            raise WireError(f"frame {KIND_NAMES.get(kind, kind)}: {array.dtype} of {ndim} dims cannot be sent")
        unsent_prefix.append(_descriptor_structs[ndim].pack(code, ndim, *array.shape))
        length += 2 + 8 * ndim
    buffers: list[Buffer] = []
    for array in arrays:
        padding, nbytes = -length % ALIGNMENT, array.nbytes
        unsent_prefix.append(_padding[padding])
        length += padding + nbytes
        if nbytes:
            buffers.append(b"".join(unsent_prefix))
            unsent_prefix = []
            for chunk in array.chunks if isinstance(array, ChunkedArray) else (array,):
                buffers.append((chunk if chunk.flags.c_contiguous else np.ascontiguousarray(chunk)).data.cast("B"))
    if unsent_prefix:
        buffers.append(b"".join(unsent_prefix))
    buffers[0] = (
        HEADER.pack(MAGIC, kind, flags, request_id, len(text), len(arrays), 0, length - HEADER.size) + buffers[0]
    )
    return buffers


def frame_size(buffers: Iterable[Buffer]) -> int:
    """How many bytes an encoded frame has."""
    return sum(len(buffer) for buffer in buffers)


def join_buffers(buffers: Iterable[Buffer]) -> np.ndarray:
    """An encoded frame as one array of bytes."""
    return np.frombuffer(b"".join(buffers), np.uint8)


def frame_length(header: Buffer, *, limit: int = MAX_FRAME_BYTES) -> int:
    """How many bytes the frame has whose header this is."""
    magic, kind, _flags, _request_id, meta_length, array_count, reserved, body_length = HEADER.unpack_from(header)
    if magic != MAGIC or reserved:
        raise WireError(f"a header begins with {magic:#010x}; frames begin with {MAGIC:#010x}")
    if meta_length > MAX_META_BYTES or meta_length + 2 * array_count > body_length:
        raise WireError(
            f"frame {KIND_NAMES.get(kind, kind)}: {meta_length} bytes of JSON, {array_count} arrays in a body of {body_length} bytes"
        )
    if HEADER.size + body_length > limit:
        raise WireError(f"frame {KIND_NAMES.get(kind, kind)}: {HEADER.size + body_length} bytes; at most {limit} here")
    return int(HEADER.size + body_length)


def max_prefix_length(header: Buffer) -> int:
    """How many bytes of the body the JSON and the descriptors may take at most."""
    _magic, _kind, _flags, _request_id, meta_length, array_count, _reserved, body_length = HEADER.unpack_from(header)
    return int(min(meta_length + array_count * (2 + 8 * MAX_NDIM), body_length))


def parse_prefix(raw: np.ndarray) -> tuple[dict[str, Any], list[tuple[np.dtype, tuple[int, ...], int]]]:
    """Of a frame's first bytes: its JSON object, and of each array the dtype, shape and place in the frame."""
    view = raw.data
    _magic, kind, _flags, _request_id, meta_length, array_count, _reserved, body_length = HEADER.unpack_from(view)
    return _parse_prefix(view, kind, meta_length, array_count, body_length)


def _parse_prefix(
    view: memoryview, kind: int, meta_length: int, array_count: int, body_length: int
) -> tuple[dict[str, Any], list[tuple[np.dtype, tuple[int, ...], int]]]:
    offset, end = HEADER.size + meta_length, HEADER.size + body_length
    try:
        text = str(view[HEADER.size : offset], "utf-8")
        meta, json_end = _scan_json(text, 0)
    except (ValueError, RecursionError, StopIteration):
        raise WireError(f"frame {KIND_NAMES.get(kind, kind)}: its meta is not JSON") from None
    if not isinstance(meta, dict) or json_end != len(text):
        raise WireError(f"frame {KIND_NAMES.get(kind, kind)}: its meta is not an object")
    descriptors = []
    try:
        for _ in range(array_count):
            ndim = view[offset + 1]
            if ndim > MAX_NDIM or view[offset] not in _DTYPE_BY_CODE:
                raise WireError(
                    f"frame {KIND_NAMES.get(kind, kind)}: no array has dtype {view[offset]} and {ndim} dims"
                )
            descriptors.append(_descriptor_structs[ndim].unpack_from(view, offset))
            offset += 2 + 8 * ndim
    except (IndexError, struct.error):
        raise WireError(f"frame {KIND_NAMES.get(kind, kind)}: its descriptors are cut off") from None
    layouts = []
    for code, _ndim, *shape in descriptors:
        offset += -offset % ALIGNMENT
        dtype = _DTYPE_BY_CODE[code]
        nbytes, extent_product = dtype.itemsize, 1
        for extent in shape:
            extent_product *= extent or 1
            nbytes *= extent
        if extent_product > _MAX_ELEMENTS:
            raise WireError(f"frame {KIND_NAMES.get(kind, kind)}: an array of shape {shape}")
        layouts.append((dtype, tuple(shape), offset))
        offset += nbytes
        if offset > end:
            raise WireError(f"frame {KIND_NAMES.get(kind, kind)}: arrays of more than its {body_length} bytes")
    if offset != end:
        raise WireError(f"frame {KIND_NAMES.get(kind, kind)}: {end - offset} bytes too many")
    return meta, layouts


def parse(raw: np.ndarray) -> Frame:
    """The frame that these bytes are, all of them."""
    view = raw.data
    if len(view) < HEADER.size or frame_length(view, limit=len(view)) != len(view):
        raise WireError(f"{len(raw)} bytes are not one frame")
    _magic, kind, flags, request_id, meta_length, array_count, _reserved, body_length = HEADER.unpack_from(view)
    meta, layouts = _parse_prefix(view, kind, meta_length, array_count, body_length)
    # An array of nothing may lie behind the last byte, where numpy lets none begin.
    arrays = [np.ndarray(shape, dtype, view, offset if offset < len(view) else 0) for dtype, shape, offset in layouts]
    return Frame(kind, request_id, meta, arrays, raw, flags)


class FrameDecoder:
    """Frames out of a stream of bytes, without a socket: receive into `get_buffer()`, then say how much to `buffer_updated()`."""

    #: What is read before it is known how long a frame is; the start of a long one is copied out of it.
    BUFFER_BYTES = 1 << 14

    def __init__(self, *, limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        self._buffer = np.empty(self.BUFFER_BYTES, np.uint8)
        self._buffered = 0
        self._large_frame: np.ndarray | None = None
        self._large_received = 0

    def get_buffer(self) -> memoryview:
        """Where the next bytes belong."""
        if self._large_frame is not None:
            return self._large_frame.data[self._large_received :]
        return self._buffer.data[self._buffered :]

    def buffer_updated(self, count: int) -> list[Frame]:
        """That many bytes were received into `get_buffer()`: the frames that they complete."""
        if self._large_frame is not None:
            self._large_received += count
            if self._large_received < len(self._large_frame):
                return []
            frame, self._large_frame = parse(self._large_frame), None
            return [frame]
        self._buffered += count
        buffer, offset, frames = self._buffer, 0, []
        while self._buffered - offset >= HEADER.size:
            length = frame_length(buffer[offset : offset + HEADER.size].data, limit=self.limit)
            available = self._buffered - offset
            if length > available:
                if length > self.BUFFER_BYTES // 2:
                    self._large_frame = np.empty(
                        length, np.uint8
                    )  # grows real only as bytes arrive: pages are touched then
                    self._large_frame[:available] = buffer[offset : self._buffered]
                    self._large_received, offset = available, self._buffered
                break
            # Owned bytes: the scratch is written over, and what reads the frame may keep views of it.
            frames.append(parse(buffer[offset : offset + length].copy()))
            offset += length
        if offset:
            remaining = self._buffered - offset
            buffer[:remaining] = buffer[offset : self._buffered].copy()
            self._buffered = remaining
        return frames

    def feed(self, data: Buffer) -> list[Frame]:
        """The same for bytes that are here already."""
        frames, view = [], memoryview(data)
        while view:
            buffer = self.get_buffer()
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            frames += self.buffer_updated(count)
            view = view[count:]
        return frames


def send(connection: socket.socket, buffers: Sequence[Buffer]) -> None:
    """Send all of a frame over a blocking socket, without joining its buffers."""
    views = [memoryview(buffer) for buffer in buffers if len(buffer)]
    position = 0
    while position < len(views):
        sent = connection.sendmsg(views[position : position + 512])
        while position < len(views) and sent >= len(views[position]):
            sent -= len(views[position])
            position += 1
        if sent:
            views[position] = views[position][sent:]


def receive(connection: socket.socket, *, limit: int = MAX_FRAME_BYTES) -> Frame:
    """One frame off a blocking socket. EOFError at an end between frames, WireError inside one."""
    header = bytearray(HEADER.size)
    _receive_exactly(connection, memoryview(header), at_frame_start=True)
    raw = np.empty(frame_length(header, limit=limit), np.uint8)
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
