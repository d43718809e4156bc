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
from echelon.server.protocol.auth import WORKER, Caller
from echelon.server.protocol.event_loop import split

#: Bytes asked of the kernel for each direction of a connection; it gives at most what net.core allows.
BUFFER = 4 << 20
#: Read at once before it is known what comes: short answers whole, of long ones the front and a little more.
SCRATCH = 16 << 10
#: Of a long answer so much is waited for at a time: waking up for every packet costs more than the copy.
AT_ONCE = 1 << 20
_BATCH = 16  # buffers per call of sendmsg and recvmsg: each costs to look at, and a call moves a few at most

Described = list[tuple[np.dtype, tuple[int, ...]]]


@dataclass(slots=True, eq=False)
class Request:
    """A frame that wants an answer. `places` may name destinations for the answer's arrays; `done` gets the answer."""

    kind: int
    meta: dict[str, Any]
    arrays: Sequence[np.ndarray]
    done: Callable[[Request, wire.Frame], None]
    places: Callable[[dict[str, Any], Described], Sequence[np.ndarray | wire.Pieces | None]] | None = None
    #: Whose it is: the section of a push, the part of a pull.
    item: Any = None
    server: str = ""
    #: Nobody waits for it any longer.
    dropped: bool = False


@dataclass(slots=True)
class _Incoming:
    """A long frame on its way in: where its remaining bytes go."""

    request: Request | None
    header: bytes
    meta: dict[str, Any]
    arrays: list[Any]
    views: list[memoryview] = field(default_factory=list)
    rest: int = 0


class Line:
    """`ready` once both ends have proved themselves. Whoever polls it calls `read` and `write`."""

    def __init__(self, server: str, address: str, secret: bytes) -> None:
        self.server, self.address = server, address
        self.ready = False
        self.began = time.monotonic()
        #: Counts the pieces of long answers.
        self.moved = 0
        self.waiting: dict[int, Request] = {}
        self._caller = Caller(secret, WORKER)
        self._out: deque[memoryview] = deque()
        self._scratch = np.empty(SCRATCH, np.uint8)
        self._have = 0
        self._incoming: _Incoming | None = None
        self._greeting = b""
        self._requests = 0
        self._least = 1
        self._offer: shared_memory.Offer | None = None
        self._shared: shared_memory.Shared | None = None
        host, port = split(address)
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.socket.setsockopt(socket.SOL_SOCKET, name, BUFFER)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            code = self.socket.connect_ex((host, port))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, errno.errorcode.get(code, "connect"))
        except OSError:
            self.socket.close()
            raise
        self._out.append(memoryview(self._caller.opening))

    @property
    def wants(self) -> int:
        """What to poll for."""
        return select.POLLIN | (select.POLLOUT if self._out else 0)

    @property
    def receiving(self) -> Request | None:
        """The request whose answer is partly here, straight in its destination."""
        return self._incoming.request if self._incoming else None

    def ask(self, request: Request) -> None:
        """Send a request (or queue it, where the connection is full)."""
        self._requests += 1
        self.waiting[self._requests] = request
        request.server = self.server
        buffers = wire.encode(request.kind, self._requests, request.meta, request.arrays)
        if self._shared is not None:
            buffers = self._shared.lend(buffers) or buffers
        self._send(buffers)

    def _send(self, buffers: Sequence[wire.Buffer]) -> None:
        empty = not self._out
        for buffer in buffers:
            if len(buffer):
                self._out.append(memoryview(buffer))
        if empty:
            self.write()

    def write(self) -> None:
        """Send what the connection takes."""
        out = self._out
        while out:
            try:
                sent = self.socket.sendmsg([out[place] for place in range(min(len(out), _BATCH))])
            except BlockingIOError:
                return
            while out and sent >= len(out[0]):
                sent -= len(out.popleft())
            if sent:
                out[0] = out[0][sent:]

    def read(self) -> None:
        """Take in what has arrived; answers go to their requests. EOFError, OSError or WireError when the connection ends."""
        while True:
            try:
                full = self._read()
            except BlockingIOError:
                return
            if not full:
                return

    def _read(self) -> bool:
        """One call to the kernel. Whether more may be there."""
        incoming = self._incoming
        if incoming is not None:
            got = self.socket.recvmsg_into(incoming.views[:_BATCH])[0]
            if not got:
                raise EOFError
            _advance(incoming.views, got)
            self.moved += 1
            incoming.rest -= got
            self._wait_for(min(incoming.rest, AT_ONCE))
            if not incoming.views:
                self._incoming = None
                self._answer(incoming)
                return False
            return True
        room = self._scratch[self._have :].data
        got = self.socket.recv_into(room)
        if not got:
            raise EOFError
        self._have += got
        if not self.ready:
            self._greet()
            return False
        self._frames()
        return self._incoming is not None

    def _wait_for(self, count: int) -> None:
        """Be told of what arrived when it is so much (or the connection ended)."""
        least = count if count == AT_ONCE else 1
        if least != self._least:
            self._least = least
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    def _greet(self) -> None:
        if self._have < self._caller.needs:
            return
        reply = self._scratch[: self._caller.needs].tobytes()
        self._scratch[: self._have - len(reply)] = self._scratch[len(reply) : self._have].copy()
        self._have -= len(reply)
        self._out.append(memoryview(self._caller.feed(reply)))
        self.ready = True
        self._offer = shared_memory.offer(self.socket)
        if self._offer is not None:
            self._out += map(memoryview, self._offer.frame)
        self.write()

    def _frames(self) -> None:
        scratch, at = self._scratch, 0
        try:
            while self._have - at >= wire.HEADER.size:
                header = scratch[at : at + wire.HEADER.size].tobytes()
                length, have = wire.frame_length(header), self._have - at
                if length <= have:
                    frame = wire.parse(scratch[at : at + length].copy())
                    at += length
                    self._take(frame)
                    continue
                front = wire.HEADER.size + wire.front_length(header)
                if have >= front:
                    self._incoming = self._begin(header, scratch[at : at + have], length)
                    at = self._have
                elif front > len(scratch):
                    self._scratch = np.empty(front + SCRATCH, np.uint8)
                break
        finally:
            # Also where whoever got a frame was interrupted: none is taken twice.
            rest = self._have - at
            self._scratch[:rest] = scratch[at : self._have].copy()
            self._have = rest

    def _take(self, frame: wire.Frame) -> None:
        if frame.kind == wire.OFFERED and self._offer is not None:
            self._shared, self._offer = self._offer.answered(frame.meta), None
            return
        if frame.kind == wire.LENT:
            if self._shared is None:
                raise wire.WireError(f"{frame} without memory to share")
            frame = self._shared.borrow(frame.meta)
        self._deliver(frame)

    def _begin(self, header: bytes, front: np.ndarray, length: int) -> _Incoming:
        """A long frame of which `front` is here: choose where its arrays go."""
        meta, places = wire.layout(front)
        request = self.waiting.get(wire.HEADER.unpack(header)[3])
        kind = wire.HEADER.unpack(header)[1]
        chosen: Sequence[np.ndarray | wire.Pieces | None] = [None] * len(places)
        if request is not None and request.places is not None and not request.dropped and kind == wire.ROWS:
            chosen = request.places(meta, [(dtype, shape) for dtype, shape, _ in places])
        incoming = _Incoming(request=request, header=header, meta=meta, arrays=[])
        at = here = len(front)
        for (dtype, shape, start), target in zip(places, chosen, strict=True):
            array = np.empty(shape, dtype) if target is None else target
            incoming.arrays.append(array)
            for piece in array.pieces if isinstance(array, wire.Pieces) else (array,):
                if not piece.nbytes:
                    continue
                view = piece.reshape(-1).data.cast("B")
                end = start + len(view)
                if start < here:
                    known = min(here - start, len(view))
                    view[:known] = front[start : start + known].data
                    view = view[known:]
                elif start > at:
                    incoming.views.append(memoryview(bytearray(start - at)))
                if view:
                    incoming.views.append(view)
                at, start = max(at, end), end
        if at < length:  # the gap before an array of nothing
            incoming.views.append(memoryview(bytearray(length - at)))
        incoming.rest = length - here
        self._wait_for(min(incoming.rest, AT_ONCE))
        return incoming

    def _answer(self, incoming: _Incoming) -> None:
        _magic, kind, flags, number, *_ = wire.HEADER.unpack(incoming.header)
        frame = wire.Frame(kind, number, incoming.meta, incoming.arrays, np.empty(0, np.uint8), flags)
        self._deliver(frame)

    def _deliver(self, frame: wire.Frame) -> None:
        request = self.waiting.get(frame.request)
        if request is not None:
            if not request.dropped:
                request.done(request, frame)
            del self.waiting[frame.request]

    def close(self) -> None:
        """End the connection."""
        self.socket.close()
        self._shared = None
        if self._offer is not None:
            self._offer.close()


def _advance(views: list[memoryview], got: int) -> None:
    """Forget the first `got` bytes of these views."""
    done = 0
    while done < len(views) and got >= len(views[done]):
        got -= len(views[done])
        done += 1
    del views[:done]
    if got:
        views[0] = views[0][got:]
