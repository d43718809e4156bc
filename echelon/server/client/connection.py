"""A worker's connection to a server: requests out, replies received straight into their destination."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from echelon.server.protocol import wire
from echelon.server.protocol.auth import WORKER, CallerHandshake
from echelon.server.protocol.connection import BaseConnection, start_connecting

#: Size of the first read of a frame: all of a short reply, the front of a long one.
RECEIVE_BUFFER_BYTES = 16 << 10
#: Bytes of a long reply to wait for before waking up: a wake-up for every packet costs more than the copy.
MAX_WAKEUP_BYTES = 1 << 20
_BUFFERS_PER_CALL = 16  # buffers per call of recvmsg: each costs time, and a call fills a few at most

ArrayLayouts = list[tuple[np.dtype, tuple[int, ...]]]
Destinations = Sequence[np.ndarray | wire.ChunkedArray | None]


@dataclass(slots=True, eq=False)
class Request:
    """A frame that expects a reply. `choose_destinations` may say where to receive the reply's arrays."""

    kind: int
    meta: dict[str, Any]
    arrays: Sequence[np.ndarray]
    on_reply: Callable[[Request, wire.Frame], None]
    choose_destinations: Callable[[dict[str, Any], ArrayLayouts], Destinations] | None = None
    #: The section of a push, the part of a pull.
    context: Any = None
    server: str = ""
    #: Ignore the reply.
    abandoned: bool = False


@dataclass(slots=True)
class _IncomingFrame:
    """A long frame that is partly received: `views` are where its remaining bytes go."""

    request: Request | None
    frame: wire.Frame
    views: list[memoryview] = field(default_factory=list)
    remaining: int = 0


class ServerConnection(BaseConnection):
    """The connection pool polls it, and calls `read` and `write`."""

    def __init__(self, server: str, address: str, secret: bytes) -> None:
        super().__init__(start_connecting(address), CallerHandshake(secret, WORKER))
        self.server, self.address = server, address
        self.dialed_at = time.monotonic()
        #: Counts the pieces of long replies.
        self.chunks_received = 0
        self.pending_requests: dict[int, Request] = {}
        self._buffer = np.empty(RECEIVE_BUFFER_BYTES, np.uint8)
        self._buffered = 0
        self._incoming: _IncomingFrame | None = None
        self._last_request_id = 0
        self._wakeup_bytes = 1

    @property
    def poll_events(self) -> int:
        return select.POLLIN | (select.POLLOUT if self.send_queue else 0)

    @property
    def receiving_request(self) -> Request | None:
        """The request whose reply is partly received."""
        return self._incoming.request if self._incoming else None

    def send_request(self, request: Request) -> None:
        """Send a request, or queue it if the socket is full."""
        self._last_request_id += 1
        self.pending_requests[self._last_request_id] = request
        request.server = self.server
        queue_was_empty = not self.send_queue
        self.queue(wire.encode(request.kind, self._last_request_id, request.meta, request.arrays))
        if queue_was_empty:
            self.write()

    def read(self) -> None:
        """Receive what has arrived and deliver replies. EOFError, OSError or EchelonError when the connection ends."""
        try:
            while self._read_once():
                pass
        except BlockingIOError:
            pass

    def _read_once(self) -> bool:
        """Receive once. Returns whether more may be available."""
        if not self.is_ready:
            self.continue_handshake()
            if self.is_ready:
                self.offer_shm()
            self.write()
            return False
        incoming = self._incoming
        if incoming is not None:
            received = self.sock.recvmsg_into(incoming.views[:_BUFFERS_PER_CALL])[0]
            if not received:
                raise EOFError
            _consume(incoming.views, received)
            self.chunks_received += 1
            incoming.remaining -= received
            self._set_wakeup_bytes(min(incoming.remaining, MAX_WAKEUP_BYTES))
            if incoming.views:
                return True
            self._incoming = None
            self._deliver(incoming.frame)
            return False
        received = self.sock.recv_into(self._buffer[self._buffered :].data)
        if not received:
            raise EOFError
        self._buffered += received
        self._parse_frames()
        return self._incoming is not None

    def _set_wakeup_bytes(self, count: int) -> None:
        """Let the poller wake up for this many bytes."""
        wakeup_bytes = count if count == MAX_WAKEUP_BYTES else 1
        if wakeup_bytes != self._wakeup_bytes:
            self._wakeup_bytes = wakeup_bytes
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakeup_bytes)

    def _parse_frames(self) -> None:
        buffer, offset = self._buffer, 0
        try:
            while self._buffered - offset >= wire.HEADER.size:
                header = buffer[offset : offset + wire.HEADER.size].tobytes()
                length, available = wire.frame_length(header), self._buffered - offset
                if length <= available:
                    frame = wire.parse(buffer[offset : offset + length].copy())
                    offset += length
                    is_shm_frame = frame.kind in (wire.SHM_REF, wire.SHM_OFFER_REPLY)
                    reply = self.handle_shm_frame(frame) if is_shm_frame else frame
                    if reply is not None:
                        self._deliver(reply)
                    continue
                prefix_length = wire.HEADER.size + wire.max_prefix_length(header)
                if available >= prefix_length:
                    self._incoming = self._begin_long_frame(buffer[offset : offset + available], length)
                    offset = self._buffered
                elif prefix_length > len(buffer):
                    self._buffer = np.empty(prefix_length + RECEIVE_BUFFER_BYTES, np.uint8)
                break
        finally:
            # Also if the receiver of a frame was interrupted: none is delivered twice.
            remaining = self._buffered - offset
            self._buffer[:remaining] = buffer[offset : self._buffered].copy()
            self._buffered = remaining

    def _begin_long_frame(self, prefix: np.ndarray, length: int) -> _IncomingFrame:
        """Choose where to receive the arrays of a long frame, of which `prefix` is here."""
        kind, request_id, meta, layouts = wire.parse_prefix(prefix.data)
        request = self.pending_requests.get(request_id)
        destinations: Destinations = [None] * len(layouts)
        if request is not None and request.choose_destinations and not request.abandoned and kind == wire.ROWS:
            destinations = request.choose_destinations(meta, [(dtype, shape) for dtype, shape, _ in layouts])
        arrays: list[Any] = []
        incoming = _IncomingFrame(request, wire.Frame(kind, request_id, meta, arrays, np.empty(0, np.uint8)))
        covered = received = len(prefix)
        for (dtype, shape, start), destination in zip(layouts, destinations, strict=True):
            array = np.empty(shape, dtype) if destination is None else destination
            arrays.append(array)
            for chunk in array.chunks if isinstance(array, wire.ChunkedArray) else (array,):
                if not chunk.nbytes:
                    continue
                view = chunk.reshape(-1).data.cast("B")
                end = start + len(view)
                if start < received:
                    available = min(received - start, len(view))
                    view[:available] = prefix[start : start + available].data
                    view = view[available:]
                elif start > covered:
                    incoming.views.append(memoryview(bytearray(start - covered)))
                if view:
                    incoming.views.append(view)
                covered, start = max(covered, end), end
        if covered < length:  # the gap before an empty array
            incoming.views.append(memoryview(bytearray(length - covered)))
        incoming.remaining = length - received
        self._set_wakeup_bytes(min(incoming.remaining, MAX_WAKEUP_BYTES))
        return incoming

    def _deliver(self, frame: wire.Frame) -> None:
        request = self.pending_requests.get(frame.request_id)
        if request is not None:
            if not request.abandoned:
                request.on_reply(request, frame)
            del self.pending_requests[frame.request_id]


def _consume(views: list[memoryview], count: int) -> None:
    """Drop the first `count` bytes of these views."""
    filled_views = 0
    while filled_views < len(views) and count >= len(views[filled_views]):
        count -= len(views[filled_views])
        filled_views += 1
    del views[:filled_views]
    if count:
        views[0] = views[0][count:]
