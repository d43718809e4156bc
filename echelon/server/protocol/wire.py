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
CLOCKED = 7
DIGEST = 8
DIGESTS = 9
STALE = 10
REFUSED = 11
# Head -> other replicas of a shard, and the answers.
HAIL = 20
HAILED = 21
ENTRY = 22
GOT = 23
SYNC = 24
SYNCED = 25
SNAPSHOT = 26
BEAT = 27
BEHIND = 28
# Any two on one machine: memory that both have, see shared.py.
OFFER = 12
OFFERED = 13
LENT = 14
# Entries of a head's own, inside ENTRY.
COMMIT = 30
ENROL = 31
FORGET = 32
# Everybody <-> controller.
JOIN = 40
MAP = 41
GRANT = 42
INSTALLED = 43
WATCH = 44
DECLARE = 45
CAUGHTUP = 46
HANDOVER = 47
DRAINED = 48
LEAVE = 49
DRAIN = 50
CHECKPOINT = 51
WRITTEN = 52
EXPIRE = 53
STATUS = 54
REPORT = 55
DONE = 56
RETURN = 57

NAMES = {value: name for name, value in list(globals().items()) if name.isupper() and type(value) is int}

MAGIC = 0x4E4C4845  # "EHLN"
HEADER = struct.Struct("<IHHQIHHQ")
ALIGN = 64
MAX_META = 1 << 20
MAX_FRAME = 1 << 30
MAX_NDIM = 4

_DTYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")
_CODES = {np.dtype("<" + name): code for code, name in enumerate(_DTYPES, start=1)}
_KINDS = {code: dtype for dtype, code in _CODES.items()}

#: Of an array's extents, which may be many where another is zero.
_LARGEST = 1 << 40

Buffer = bytes | bytearray | memoryview

_descriptors = [struct.Struct(f"<BB{ndim}Q") for ndim in range(MAX_NDIM + 1)]
_zeros = [bytes(count) for count in range(ALIGN)]
_decoder: Any = json.JSONDecoder()
_scan = _decoder.scan_once


def _writer() -> Callable[[dict[str, Any]], str]:
    """JSON without spaces. JSONEncoder.encode makes a new compiled encoder for each call, which takes longer than a frame's JSON."""
    encoder = json.JSONEncoder(separators=(",", ":"))
    module: Any = json.encoder
    make = module.c_make_encoder
    if make is None:
        return encoder.encode
    chunks = make(None, encoder.default, module.encode_basestring_ascii, None, ":", ",", False, False, True)
    return lambda meta: "".join(chunks(meta, 0))


_write = _writer()


class WireError(ServerError):
    """Bytes that are no frame: the connection that they came over is closed."""


class Frame:
    """A frame that was received. `arrays` are views of `raw`, the frame's bytes."""

    __slots__ = ("arrays", "flags", "kind", "meta", "raw", "request")

    def __init__(
        self, kind: int, request: int, meta: dict[str, Any], arrays: list[np.ndarray], raw: np.ndarray, flags: int = 0
    ) -> None:
        self.kind, self.request, self.meta, self.arrays, self.raw, self.flags = kind, request, meta, arrays, raw, flags

    def __repr__(self) -> str:
        return f"{NAMES.get(self.kind, self.kind)} #{self.request} {self.meta} {[array.shape for array in self.arrays]}"


class Pieces:
    """Flat arrays of one dtype that travel end to end, as one array: what lies apart is not joined first."""

    __slots__ = ("dtype", "nbytes", "pieces", "shape")
    ndim = 1

    def __init__(self, pieces: Sequence[np.ndarray]) -> None:
        self.pieces, self.dtype = pieces, pieces[0].dtype
        self.shape = (sum(len(piece) for piece in pieces),)
        self.nbytes = self.shape[0] * self.dtype.itemsize


def encode(
    kind: int, request: int, meta: dict[str, Any], arrays: Sequence[np.ndarray | Pieces] = (), *, flags: int = 0
) -> list[Buffer]:
    """A frame as buffers for sendmsg: arrays are not copied (unless they are not contiguous)."""
    text = _write(meta).encode() if meta else b"{}"
    if len(text) > MAX_META:
        raise WireError(f"frame {NAMES.get(kind, kind)}: {len(text)} bytes of JSON; at most {MAX_META}")
    if not arrays:
        return [HEADER.pack(MAGIC, kind, flags, request, len(text), 0, 0, len(text)) + text]
    pieces = [text]
    length = HEADER.size + len(text)
    for array in arrays:
        code, ndim = _CODES.get(array.dtype), array.ndim
        if code is None or ndim > MAX_NDIM:
            raise WireError(f"frame {NAMES.get(kind, kind)}: {array.dtype} of {ndim} dims cannot be sent")
        pieces.append(_descriptors[ndim].pack(code, ndim, *array.shape))
        length += 2 + 8 * ndim
    buffers: list[Buffer] = []
    for array in arrays:
        gap, size = -length % ALIGN, array.nbytes
        pieces.append(_zeros[gap])
        length += gap + size
        if size:
            buffers.append(b"".join(pieces))
            pieces = []
            for each in array.pieces if isinstance(array, Pieces) else (array,):
                buffers.append((each if each.flags.c_contiguous else np.ascontiguousarray(each)).data.cast("B"))
    if pieces:
        buffers.append(b"".join(pieces))
    buffers[0] = HEADER.pack(MAGIC, kind, flags, request, len(text), len(arrays), 0, length - HEADER.size) + buffers[0]
    return buffers


def size_of(buffers: Iterable[Buffer]) -> int:
    """How many bytes an encoded frame has."""
    return sum(len(buffer) for buffer in buffers)


def joined(buffers: Iterable[Buffer]) -> np.ndarray:
    """An encoded frame as one array of bytes."""
    return np.frombuffer(b"".join(buffers), np.uint8)


def frame_length(header: Buffer, *, limit: int = MAX_FRAME) -> int:
    """How many bytes the frame has whose header this is."""
    magic, kind, _flags, _request, meta, arrays, reserved, body = HEADER.unpack_from(header)
    if magic != MAGIC or reserved:
        raise WireError(f"a header begins with {magic:#010x}; frames begin with {MAGIC:#010x}")
    if meta > MAX_META or meta + 2 * arrays > body:
        raise WireError(
            f"frame {NAMES.get(kind, kind)}: {meta} bytes of JSON, {arrays} arrays in a body of {body} bytes"
        )
    if HEADER.size + body > limit:
        raise WireError(f"frame {NAMES.get(kind, kind)}: {HEADER.size + body} bytes; at most {limit} here")
    return int(HEADER.size + body)


def front_length(header: Buffer) -> int:
    """How many bytes of the body the JSON and the descriptors may take at most."""
    _magic, _kind, _flags, _request, meta, arrays, _reserved, body = HEADER.unpack_from(header)
    return int(min(meta + arrays * (2 + 8 * MAX_NDIM), body))


def layout(raw: np.ndarray) -> tuple[dict[str, Any], list[tuple[np.dtype, tuple[int, ...], int]]]:
    """Of a frame's first bytes: its JSON object, and of each array the dtype, shape and place in the frame."""
    view = raw.data
    _magic, kind, _flags, _request, meta_length, count, _reserved, body = HEADER.unpack_from(view)
    return _layout(view, kind, meta_length, count, body)


def _layout(
    view: memoryview, kind: int, meta_length: int, count: int, body: int
) -> tuple[dict[str, Any], list[tuple[np.dtype, tuple[int, ...], int]]]:
    at, end = HEADER.size + meta_length, HEADER.size + body
    try:
        text = str(view[HEADER.size : at], "utf-8")
        meta, last = _scan(text, 0)
    except (ValueError, RecursionError, StopIteration):
        raise WireError(f"frame {NAMES.get(kind, kind)}: its meta is not JSON") from None
    if not isinstance(meta, dict) or last != len(text):
        raise WireError(f"frame {NAMES.get(kind, kind)}: its meta is not an object")
    described = []
    try:
        for _ in range(count):
            ndim = view[at + 1]
            if ndim > MAX_NDIM or view[at] not in _KINDS:
                raise WireError(f"frame {NAMES.get(kind, kind)}: no array has dtype {view[at]} and {ndim} dims")
            described.append(_descriptors[ndim].unpack_from(view, at))
            at += 2 + 8 * ndim
    except (IndexError, struct.error):
        raise WireError(f"frame {NAMES.get(kind, kind)}: its descriptors are cut off") from None
    places = []
    for code, _ndim, *shape in described:
        at += -at % ALIGN
        dtype = _KINDS[code]
        size, span = dtype.itemsize, 1
        for extent in shape:
            span *= extent or 1
            size *= extent
        if span > _LARGEST:
            raise WireError(f"frame {NAMES.get(kind, kind)}: an array of shape {shape}")
        places.append((dtype, tuple(shape), at))
        at += size
        if at > end:
            raise WireError(f"frame {NAMES.get(kind, kind)}: arrays of more than its {body} bytes")
    if at != end:
        raise WireError(f"frame {NAMES.get(kind, kind)}: {end - at} bytes too many")
    return meta, places


def parse(raw: np.ndarray) -> Frame:
    """The frame that these bytes are, all of them."""
    view = raw.data
    if len(view) < HEADER.size or frame_length(view, limit=len(view)) != len(view):
        raise WireError(f"{len(raw)} bytes are not one frame")
    _magic, kind, flags, request, meta_length, count, _reserved, body = HEADER.unpack_from(view)
    meta, places = _layout(view, kind, meta_length, count, body)
    # An array of nothing may lie behind the last byte, where numpy lets none begin.
    arrays = [np.ndarray(shape, dtype, view, at if at < len(view) else 0) for dtype, shape, at in places]
    return Frame(kind, request, meta, arrays, raw, flags)


class Decoder:
    """Frames out of a stream of bytes, without a socket: receive into `room()`, then say how much to `fill()`."""

    #: What is read before it is known how long a frame is; the start of a long one is copied out of it.
    SCRATCH = 1 << 14

    def __init__(self, *, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self._scratch = np.empty(self.SCRATCH, np.uint8)
        self._filled = 0
        self._large: np.ndarray | None = None
        self._have = 0

    def room(self) -> memoryview:
        """Where the next bytes belong."""
        if self._large is not None:
            return self._large.data[self._have :]
        return self._scratch.data[self._filled :]

    def fill(self, count: int) -> list[Frame]:
        """That many bytes were received into `room()`: the frames that they complete."""
        if self._large is not None:
            self._have += count
            if self._have < len(self._large):
                return []
            frame, self._large = parse(self._large), None
            return [frame]
        self._filled += count
        scratch, at, frames = self._scratch, 0, []
        while self._filled - at >= HEADER.size:
            length = frame_length(scratch[at : at + HEADER.size].data, limit=self.limit)
            have = self._filled - at
            if length > have:
                if length > self.SCRATCH // 2:
                    self._large = np.empty(length, np.uint8)  # grows real only as bytes arrive: pages are touched then
                    self._large[:have] = scratch[at : self._filled]
                    self._have, at = have, self._filled
                break
            # Owned bytes: the scratch is written over, and what reads the frame may keep views of it.
            frames.append(parse(scratch[at : at + length].copy()))
            at += length
        if at:
            rest = self._filled - at
            scratch[:rest] = scratch[at : self._filled].copy()
            self._filled = rest
        return frames

    def feed(self, data: Buffer) -> list[Frame]:
        """The same for bytes that are here already."""
        frames, view = [], memoryview(data)
        while view:
            room = self.room()
            count = min(len(room), len(view))
            room[:count] = view[:count]
            frames += self.fill(count)
            view = view[count:]
        return frames


def send(connection: socket.socket, buffers: Sequence[Buffer]) -> None:
    """Send all of a frame over a blocking socket, without joining its buffers."""
    views = [memoryview(buffer) for buffer in buffers if len(buffer)]
    at = 0
    while at < len(views):
        sent = connection.sendmsg(views[at : at + 512])
        while at < len(views) and sent >= len(views[at]):
            sent -= len(views[at])
            at += 1
        if sent:
            views[at] = views[at][sent:]


def receive(connection: socket.socket, *, limit: int = MAX_FRAME) -> Frame:
    """One frame off a blocking socket. EOFError at an end between frames, WireError inside one."""
    header = bytearray(HEADER.size)
    _fill(connection, memoryview(header), first=True)
    raw = np.empty(frame_length(header, limit=limit), np.uint8)
    raw[: HEADER.size] = np.frombuffer(header, np.uint8)
    _fill(connection, raw.data[HEADER.size :])
    return parse(raw)


def _fill(connection: socket.socket, view: memoryview, *, first: bool = False) -> None:
    while view:
        got = connection.recv_into(view)
        if not got:
            if first and len(view) == HEADER.size:
                raise EOFError
            raise WireError("the connection ended inside a frame")
        view, first = view[got:], False
