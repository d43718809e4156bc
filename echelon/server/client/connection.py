"""One connection of a worker to one server: dialled, greeted, then frames in both directions, answers straight into their final place."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from echelon.server.protocol import shared_memory, wire
from echelon.server.protocol.auth import WORKER, CallerHandshake
from echelon.server.protocol.event_loop import parse_address

#: Bytes asked of the kernel for each direction of a connection; it gives at most what net.core allows.
SOCKET_BUFFER_BYTES = 4 << 20
#: Read at once before it is known what comes: short answers whole, of long ones the front and a little more.
RECEIVE_BUFFER_BYTES = 16 << 10
#: Of a long answer so much is waited for at a time: waking up for every packet costs more than the copy.
MAX_WAKEUP_BYTES = 1 << 20
_BUFFERS_PER_CALL = 16  # buffers per call of sendmsg and recvmsg: each costs to look at, and a call moves a few at most

ArrayLayouts = list[tuple[np.dtype, tuple[int, ...]]]


@dataclass(slots=True, eq=False)
class Request:
    """A frame that wants an answer. `choose_destinations` may name destinations for the answer's arrays; `on_reply` gets the answer."""

    kind: int
    meta: dict[str, Any]
    arrays: Sequence[np.ndarray]
    on_reply: Callable[[Request, wire.Frame], None]
    choose_destinations: (
        Callable[[dict[str, Any], ArrayLayouts], Sequence[np.ndarray | wire.ChunkedArray | None]] | None
    ) = None
    #: Whose it is: the section of a push, the part of a pull.
    context: Any = None
    server: str = ""
    #: Nobody waits for it any longer.
    abandoned: bool = False


@dataclass(slots=True)
class _IncomingFrame:
    """A long frame on its way in: where its remaining bytes go."""

    request: Request | None
    header: bytes
    meta: dict[str, Any]
    arrays: list[Any]
    views: list[memoryview] = field(default_factory=list)
    remaining: int = 0


class ServerConnection:
    """`is_ready` once both ends have proved themselves. Whoever polls it calls `read` and `write`."""

    def __init__(self, server: str, address: str, secret: bytes) -> None:
        self.server, self.address = server, address
        self.is_ready = False
        self.dialed_at = time.monotonic()
        #: Counts the pieces of long answers.
        self.chunks_received = 0
        self.pending_requests: dict[int, Request] = {}
        self._handshake = CallerHandshake(secret, WORKER)
        self._send_queue: deque[memoryview] = deque()
        self._buffer = np.empty(RECEIVE_BUFFER_BYTES, np.uint8)
        self._buffered = 0
        self._incoming: _IncomingFrame | None = None
        self._greeting = b""
        self._last_request_id = 0
        self._wakeup_bytes = 1
        self._shm_offer: shared_memory.SharedMemoryOffer | None = None
        self._shm_channel: shared_memory.SharedMemoryChannel | None = None
        host, port = parse_address(address)
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.socket.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            error_code = self.socket.connect_ex((host, port))
            if error_code not in (0, errno.EINPROGRESS):
                raise OSError(error_code, errno.errorcode.get(error_code, "connect"))
        except OSError:
            self.socket.close()
            raise
        self._send_queue.append(memoryview(self._handshake.hello))

    @property
    def poll_events(self) -> int:
        """What to poll for."""
        return select.POLLIN | (select.POLLOUT if self._send_queue else 0)

    @property
    def receiving_request(self) -> Request | None:
        """The request whose answer is partly here, straight in its destination."""
        return self._incoming.request if self._incoming else None

    def send_request(self, request: Request) -> None:
        """Send a request (or queue it, where the connection is full)."""
        self._last_request_id += 1
        self.pending_requests[self._last_request_id] = request
        request.server = self.server
        buffers = wire.encode(request.kind, self._last_request_id, request.meta, request.arrays)
        if self._shm_channel is not None:
            buffers = self._shm_channel.publish(buffers) or buffers
        self._send(buffers)

    def _send(self, buffers: Sequence[wire.Buffer]) -> None:
        queue_was_empty = not self._send_queue
        for buffer in buffers:
            if len(buffer):
                self._send_queue.append(memoryview(buffer))
        if queue_was_empty:
            self.write()

    def write(self) -> None:
        """Send what the connection takes."""
        send_queue = self._send_queue
        while send_queue:
            try:
                sent = self.socket.sendmsg(
                    [send_queue[position] for position in range(min(len(send_queue), _BUFFERS_PER_CALL))]
                )
            except BlockingIOError:
                return
            while send_queue and sent >= len(send_queue[0]):
                sent -= len(send_queue.popleft())
            if sent:
                send_queue[0] = send_queue[0][sent:]

    def read(self) -> None:
        """Take in what has arrived; answers go to their requests. EOFError, OSError or WireError when the connection ends."""
        while True:
            try:
                more_available = self._read_once()
            except BlockingIOError:
                return
            if not more_available:
                return

    def _read_once(self) -> bool:
        """One call to the kernel. Whether more may be there."""
        incoming = self._incoming
        if incoming is not None:
            received = self.socket.recvmsg_into(incoming.views[:_BUFFERS_PER_CALL])[0]
            if not received:
                raise EOFError
            _consume(incoming.views, received)
            self.chunks_received += 1
            incoming.remaining -= received
            self._set_wakeup_bytes(min(incoming.remaining, MAX_WAKEUP_BYTES))
            if not incoming.views:
                self._incoming = None
                self._finish_long_frame(incoming)
                return False
            return True
        free_buffer = self._buffer[self._buffered :].data
        received = self.socket.recv_into(free_buffer)
        if not received:
            raise EOFError
        self._buffered += received
        if not self.is_ready:
            self._finish_handshake()
            return False
        self._parse_frames()
        return self._incoming is not None

    def _set_wakeup_bytes(self, count: int) -> None:
        """Be told of what arrived when it is so much (or the connection ended)."""
        wakeup_bytes = count if count == MAX_WAKEUP_BYTES else 1
        if wakeup_bytes != self._wakeup_bytes:
            self._wakeup_bytes = wakeup_bytes
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakeup_bytes)

    def _finish_handshake(self) -> None:
        if self._buffered < self._handshake.bytes_needed:
            return
        reply = self._buffer[: self._handshake.bytes_needed].tobytes()
        self._buffer[: self._buffered - len(reply)] = self._buffer[len(reply) : self._buffered].copy()
        self._buffered -= len(reply)
        self._send_queue.append(memoryview(self._handshake.feed(reply)))
        self.is_ready = True
        self._shm_offer = shared_memory.make_offer(self.socket)
        if self._shm_offer is not None:
            self._send_queue += map(memoryview, self._shm_offer.frame)
        self.write()

    def _parse_frames(self) -> None:
        buffer, offset = self._buffer, 0
        try:
            while self._buffered - offset >= wire.HEADER.size:
                header = buffer[offset : offset + wire.HEADER.size].tobytes()
                length, available = wire.frame_length(header), self._buffered - offset
                if length <= available:
                    frame = wire.parse(buffer[offset : offset + length].copy())
                    offset += length
                    self._handle_frame(frame)
                    continue
                prefix_length = wire.HEADER.size + wire.max_prefix_length(header)
                if available >= prefix_length:
                    self._incoming = self._begin_long_frame(header, buffer[offset : offset + available], length)
                    offset = self._buffered
                elif prefix_length > len(buffer):
                    self._buffer = np.empty(prefix_length + RECEIVE_BUFFER_BYTES, np.uint8)
                break
        finally:
            # Also where whoever got a frame was interrupted: none is taken twice.
            remaining = self._buffered - offset
            self._buffer[:remaining] = buffer[offset : self._buffered].copy()
            self._buffered = remaining

    def _handle_frame(self, frame: wire.Frame) -> None:
        if frame.kind == wire.SHM_OFFER_REPLY and self._shm_offer is not None:
            self._shm_channel, self._shm_offer = self._shm_offer.on_reply(frame.meta), None
            return
        if frame.kind == wire.SHM_REF:
            if self._shm_channel is None:
                raise wire.WireError(f"{frame} without memory to share")
            frame = self._shm_channel.resolve(frame.meta)
        self._deliver(frame)

    def _begin_long_frame(self, header: bytes, prefix: np.ndarray, length: int) -> _IncomingFrame:
        """A long frame of which `prefix` is here: choose where its arrays go."""
        meta, layouts = wire.parse_prefix(prefix)
        request = self.pending_requests.get(wire.HEADER.unpack(header)[3])
        kind = wire.HEADER.unpack(header)[1]
        destinations: Sequence[np.ndarray | wire.ChunkedArray | None] = [None] * len(layouts)
        if (
            request is not None
            and request.choose_destinations is not None
            and not request.abandoned
            and kind == wire.ROWS
        ):
            destinations = request.choose_destinations(meta, [(dtype, shape) for dtype, shape, _ in layouts])
        incoming = _IncomingFrame(request=request, header=header, meta=meta, arrays=[])
        covered = received = len(prefix)
        for (dtype, shape, start), destination in zip(layouts, destinations, strict=True):
            array = np.empty(shape, dtype) if destination is None else destination
            incoming.arrays.append(array)
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
        if covered < length:  # the gap before an array of nothing
            incoming.views.append(memoryview(bytearray(length - covered)))
        incoming.remaining = length - received
        self._set_wakeup_bytes(min(incoming.remaining, MAX_WAKEUP_BYTES))
        return incoming

    def _finish_long_frame(self, incoming: _IncomingFrame) -> None:
        _magic, kind, flags, request_id, *_ = wire.HEADER.unpack(incoming.header)
        frame = wire.Frame(kind, request_id, incoming.meta, incoming.arrays, np.empty(0, np.uint8), flags)
        self._deliver(frame)

    def _deliver(self, frame: wire.Frame) -> None:
        request = self.pending_requests.get(frame.request_id)
        if request is not None:
            if not request.abandoned:
                request.on_reply(request, frame)
            del self.pending_requests[frame.request_id]

    def close(self) -> None:
        """End the connection."""
        self.socket.close()
        self._shm_channel = None
        if self._shm_offer is not None:
            self._shm_offer.close()


def _consume(views: list[memoryview], count: int) -> None:
    """Forget the first `count` bytes of these views."""
    filled_views = 0
    while filled_views < len(views) and count >= len(views[filled_views]):
        count -= len(views[filled_views])
        filled_views += 1
    del views[:filled_views]
    if count:
        views[0] = views[0][count:]
