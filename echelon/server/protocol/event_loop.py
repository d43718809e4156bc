"""Sockets for the state machines: one thread, nothing blocks, every connection proves itself before a frame of it is read."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from echelon.errors import ServerError
from echelon.server.protocol import shared_memory, wire
from echelon.server.protocol.auth import LIMIT, Caller, Listener, SecretError

TICK = 0.05
BUFFER = 1 << 22
#: Callers that have not proved themselves yet, at once.
STRANGERS = 128
#: A peer that does not read its answers is not read from beyond this.
UNSENT = 1 << 26
_VIEWS = 16
READ, WRITE = select.POLLIN, select.POLLOUT
_SHARING = (wire.LENT, wire.OFFER, wire.OFFERED)


class Connection:
    """One connection, accepted or made. `tag` is the owner's."""

    __slots__ = (
        "decoder", "door", "greeting", "handle", "offer", "opened", "out", "role", "shared", "sharing", "sock", "tag", "unsent", "wants",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, door: Caller | Listener, limit: int, tag: Any) -> None:
        self.sock, self.door, self.tag = sock, door, tag
        self.handle = sock.fileno()
        self.greeting: bytearray | None = bytearray()
        self.decoder = wire.Decoder(limit=limit)
        self.out: deque[memoryview] = deque()
        self.unsent = 0
        self.role = 0
        #: Whether memory may be shared with the other end; what both have, and what was offered.
        self.sharing = False
        self.shared: shared_memory.Shared | None = None
        self.offer: shared_memory.Offer | None = None
        self.opened = time.monotonic()
        self.wants = 0


class Owner(Protocol):
    """Whom a loop serves."""

    def opened(self, connection: Connection) -> None: ...
    def received(self, connection: Connection, frame: wire.Frame) -> None: ...
    def closed(self, connection: Connection) -> None: ...
    def tick(self, now: float) -> None: ...


def split(address: str) -> tuple[str, int]:
    """Host and port of "host:port"."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ServerError(f"{address!r} is no address; write host:port")
    return host.strip("[]"), int(port)


class Loop:
    """Call `run`; everything else is called from inside it. `sharing`: those who call may offer memory for long frames."""

    def __init__(self, owner: Owner, secret: bytes, *, limit: int = wire.MAX_FRAME, sharing: bool = False) -> None:
        self.owner, self._secret, self._limit, self._sharing = owner, secret, limit, sharing
        self._poll, self._wait = _poller()
        self._connections: dict[int, Connection] = {}
        self._strangers: dict[int, Connection] = {}
        self._listener: socket.socket | None = None
        #: What was given to send since an event began: frames for one peer go out together.
        self._unflushed: dict[int, Connection] = {}
        self._calls: dict[int, Callable[[], None]] = {}
        self.running = True
        self.sent = 0
        self.got = 0

    def listen(self, host: str, port: int) -> str:
        """Accept connections; the address that others reach it at."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _widen(listener)
            listener.bind((host, port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise ServerError(
                f"{host}:{port}: cannot listen there ({error.strerror}); choose another address or port 0"
            ) from None
        listener.setblocking(False)
        self._poll.register(listener, READ)
        self._listener = listener
        name = listener.getsockname()
        return f"[{name[0]}]:{name[1]}" if family == socket.AF_INET6 else f"{name[0]}:{name[1]}"

    def watch(self, handle: int, call: Callable[[], None]) -> None:
        """Call when a file can be read."""
        self._calls[handle] = call
        self._poll.register(handle, READ)

    def unwatch(self, handle: int) -> None:
        """Not any more."""
        if self._calls.pop(handle, None) is not None:
            self._poll.unregister(handle)

    def connect(self, address: str, role: int, tag: Any, *, sharing: bool = False) -> Connection | None:
        """Call someone; `owner.opened` once both have proved themselves, `owner.closed` if it fails later; None if it fails at once.

        `sharing`: offer memory for long frames, to someone who knows what that is.
        """
        host, port = split(address)
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            _widen(sock)
            state = sock.connect_ex((host, port))
            if state not in (0, errno.EINPROGRESS):
                sock.close()
                return None
            _hurry(sock)
        except OSError:
            sock.close()
            return None
        door = Caller(self._secret, role)
        connection = Connection(sock, door, self._limit, tag)
        connection.sharing = sharing
        connection.out.append(memoryview(door.opening))
        connection.unsent = len(door.opening)
        self._add(connection)
        self._want(connection)
        return connection

    def send(self, connection: Connection, buffers: Sequence[wire.Buffer]) -> None:
        """Send a frame, now as far as it goes, the rest when there is room."""
        if connection.handle not in self._connections:
            return
        if connection.shared is not None:
            buffers = connection.shared.lend(buffers) or buffers
        for buffer in buffers:
            if len(buffer):
                connection.out.append(memoryview(buffer))
                connection.unsent += len(buffer)
        self._unflushed[connection.handle] = connection

    def close(self, connection: Connection) -> None:
        """Close a connection; its owner is told."""
        if self._connections.pop(connection.handle, None) is None:
            return
        self._strangers.pop(connection.handle, None)
        with contextlib.suppress(KeyError, OSError):
            self._poll.unregister(connection.handle)
        connection.sock.close()
        connection.out.clear()
        connection.shared = None
        if connection.offer is not None:
            connection.offer.close()
        self.owner.closed(connection)

    def run(self) -> None:
        """Until `running` is false."""
        due = time.monotonic() + TICK
        try:
            while self.running:
                for handle, events in self._wait(max(0.0, due - time.monotonic())):
                    self._event(handle, events)
                    if self._unflushed:
                        self._flush_all()
                now = time.monotonic()
                if now >= due:
                    due = now + TICK
                    self._expel(now)
                    self.owner.tick(now)
                    self._flush_all()
        finally:
            self.stop()

    def stop(self) -> None:
        """Close all sockets, without a word to the owner."""
        for connection in list(self._connections.values()):
            connection.sock.close()
        self._connections.clear()
        if self._listener is not None:
            self._listener.close()
        if hasattr(self._poll, "close"):
            self._poll.close()

    def _event(self, handle: int, events: int) -> None:
        connection = self._connections.get(handle)
        if connection is None:
            if self._listener is not None and handle == self._listener.fileno():
                self._accept()
            elif handle in self._calls:
                self._calls[handle]()
            return
        if events & WRITE:
            self._flush(connection)
        if events & ~WRITE and handle in self._connections:  # an error or a hang-up is read too
            self._read(connection)

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(16):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                time.sleep(0.01)  # no handles left: it would be told again at once
                return
            if len(self._strangers) >= STRANGERS:
                self.close(next(iter(self._strangers.values())))
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                _hurry(sock)
            connection = Connection(sock, Listener(self._secret), self._limit, None)
            connection.sharing = self._sharing
            self._add(connection)
            self._strangers[connection.handle] = connection

    def _add(self, connection: Connection) -> None:
        self._connections[connection.handle] = connection
        connection.wants = READ
        self._poll.register(connection.handle, READ)

    def _want(self, connection: Connection) -> None:
        wants = 0
        if connection.unsent <= UNSENT or isinstance(connection.door, Caller):
            wants |= READ
        if connection.out:
            wants |= WRITE
        if wants != connection.wants:
            connection.wants = wants
            self._poll.modify(connection.handle, wants)

    def _flush_all(self) -> None:
        while self._unflushed:
            _, connection = self._unflushed.popitem()
            if connection.handle in self._connections:
                if connection.wants & WRITE or connection.greeting is not None:
                    self._want(connection)
                else:
                    self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        out = connection.out
        try:
            while out:
                views = [out[place] for place in range(min(len(out), _VIEWS))]
                count = connection.sock.sendmsg(views)
                connection.unsent -= count
                self.sent += count
                while count:
                    if count >= len(out[0]):
                        count -= len(out.popleft())
                    else:
                        out[0] = out[0][count:]
                        count = 0
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.close(connection)
            return
        self._want(connection)

    def _read(self, connection: Connection) -> None:
        if connection.greeting is not None:
            self._greet(connection)
            return
        try:
            count = connection.sock.recv_into(connection.decoder.room())
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if not count:
            self.close(connection)
            return
        self.got += count
        try:
            frames = connection.decoder.fill(count)
        except (wire.WireError, ValueError, OverflowError, MemoryError):
            self.close(connection)
            return
        for frame in frames:
            if connection.handle not in self._connections:
                return
            if connection.sharing and frame.kind in _SHARING:
                self._share(connection, frame)
            else:
                self.owner.received(connection, frame)

    def _share(self, connection: Connection, frame: wire.Frame) -> None:
        """A frame about memory that both ends have, or one that lies in it."""
        try:
            if frame.kind == wire.LENT and connection.shared is not None:
                frame = connection.shared.borrow(frame.meta)
            elif frame.kind == wire.OFFERED and connection.offer is not None:
                connection.shared, connection.offer = connection.offer.answered(frame.meta), None
                return
            elif frame.kind == wire.OFFER and connection.shared is None:
                connection.shared = shared_memory.take(frame.meta)
                # Said before anything is lent: `send` would not lend something so short.
                self.send(connection, wire.encode(wire.OFFERED, 0, {"taken": connection.shared is not None}))
                return
            else:
                raise wire.WireError(f"{frame} without memory to share")
        except (wire.WireError, ValueError, OverflowError, MemoryError):
            self.close(connection)
            return
        self.got += len(frame.raw)
        self.owner.received(connection, frame)

    def _greet(self, connection: Connection) -> None:
        door, have = connection.door, connection.greeting
        assert have is not None
        try:
            part = connection.sock.recv(door.needs - len(have))
            if not part:
                raise SecretError("hung up")
            have += part
            if len(have) < door.needs:
                return
            connection.greeting = bytearray()
            reply = door.feed(bytes(have))
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, SecretError):
            self.close(connection)
            return
        if reply:
            connection.out.append(memoryview(reply))
            connection.unsent += len(reply)
        if door.done:
            connection.greeting = None
            connection.role = door.role if isinstance(door, Listener) else 0
            self._strangers.pop(connection.handle, None)
        self._flush(connection)
        if door.done and connection.handle in self._connections:
            if connection.sharing and isinstance(door, Caller):
                connection.offer = shared_memory.offer(connection.sock)
                if connection.offer is not None:
                    self.send(connection, connection.offer.frame)
            self.owner.opened(connection)

    def _expel(self, now: float) -> None:
        late = [each for each in self._connections.values() if each.greeting is not None and now - each.opened > LIMIT]
        for connection in late:
            self.close(connection)


def _poller() -> tuple[Any, Callable[[float], list[tuple[int, int]]]]:
    """What watches handles, and how it is waited on for so many seconds: bare, because `selectors` costs more than a small frame's work."""
    if hasattr(select, "epoll"):
        epoll = select.epoll()
        return epoll, epoll.poll
    poll = select.poll()
    return poll, lambda seconds: poll.poll(seconds * 1e3)


def _hurry(sock: socket.socket) -> None:
    """Small frames go at once; a peer that vanished without a word is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_USER_TIMEOUT", 5000), ("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _widen(sock: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER)


def here() -> str:
    """What tells this host from others."""
    return os.uname().nodename
