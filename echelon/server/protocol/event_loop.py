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
from echelon.server.protocol.auth import HANDSHAKE_TIMEOUT, CallerHandshake, ListenerHandshake, SecretError

TICK_INTERVAL = 0.05
SOCKET_BUFFER_BYTES = 1 << 22
#: Callers that have not proved themselves yet, at once.
MAX_UNAUTHENTICATED = 128
#: A peer that does not read its answers is not read from beyond this.
MAX_UNSENT_BYTES = 1 << 26
_BUFFERS_PER_CALL = 16
READ, WRITE = select.POLLIN, select.POLLOUT
_SHM_KINDS = (wire.SHM_REF, wire.SHM_OFFER, wire.SHM_OFFER_REPLY)


class Connection:
    """One connection, accepted or made. `tag` is the owner's."""

    __slots__ = (
        "decoder",
        "fd",
        "handshake",
        "handshake_buffer",
        "opened_at",
        "poll_events",
        "role",
        "send_queue",
        "shm_allowed",
        "shm_channel",
        "shm_offer",
        "sock",
        "tag",
        "unsent_bytes",
    )  # fmt: skip

    def __init__(
        self, sock: socket.socket, handshake: CallerHandshake | ListenerHandshake, max_frame_bytes: int, tag: Any
    ) -> None:
        self.sock, self.handshake, self.tag = sock, handshake, tag
        self.fd = sock.fileno()
        self.handshake_buffer: bytearray | None = bytearray()
        self.decoder = wire.FrameDecoder(limit=max_frame_bytes)
        self.send_queue: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.role = 0
        #: Whether memory may be shared with the other end; what both have, and what was offered.
        self.shm_allowed = False
        self.shm_channel: shared_memory.SharedMemoryChannel | None = None
        self.shm_offer: shared_memory.SharedMemoryOffer | None = None
        self.opened_at = time.monotonic()
        self.poll_events = 0


class ConnectionHandler(Protocol):
    """Whom a loop serves."""

    def on_open(self, connection: Connection) -> None: ...
    def on_frame(self, connection: Connection, frame: wire.Frame) -> None: ...
    def on_close(self, connection: Connection) -> None: ...
    def on_tick(self, now: float) -> None: ...


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port"."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ServerError(f"{address!r} is no address; write host:port")
    return host.strip("[]"), int(port)


class EventLoop:
    """Call `run`; everything else is called from inside it. `sharing`: those who call may offer memory for long frames."""

    def __init__(
        self,
        handler: ConnectionHandler,
        secret: bytes,
        *,
        max_frame_bytes: int = wire.MAX_FRAME_BYTES,
        allow_shm: bool = False,
    ) -> None:
        self.handler, self._secret, self._max_frame_bytes, self._allow_shm = handler, secret, max_frame_bytes, allow_shm
        self._poller, self._wait_for_events = _make_poller()
        self._connections: dict[int, Connection] = {}
        self._unauthenticated: dict[int, Connection] = {}
        self._listener: socket.socket | None = None
        #: What was given to send since an event began: frames for one peer go out together.
        self._unflushed: dict[int, Connection] = {}
        self._callbacks: dict[int, Callable[[], None]] = {}
        self.running = True
        self.bytes_sent = 0
        self.bytes_received = 0

    def listen(self, host: str, port: int) -> str:
        """Accept connections; the address that others reach it at."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _set_buffer_sizes(listener)
            listener.bind((host, port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise ServerError(
                f"{host}:{port}: cannot listen there ({error.strerror}); choose another address or port 0"
            ) from None
        listener.setblocking(False)
        self._poller.register(listener, READ)
        self._listener = listener
        name = listener.getsockname()
        return f"[{name[0]}]:{name[1]}" if family == socket.AF_INET6 else f"{name[0]}:{name[1]}"

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call when a file can be read."""
        self._callbacks[fd] = callback
        self._poller.register(fd, READ)

    def unwatch(self, fd: int) -> None:
        """Not any more."""
        if self._callbacks.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def connect(self, address: str, role: int, tag: Any, *, allow_shm: bool = False) -> Connection | None:
        """Call someone; `owner.opened` once both have proved themselves, `owner.closed` if it fails later; None if it fails at once.

        `allow_shm`: offer memory for long frames, to someone who knows what that is.
        """
        host, port = parse_address(address)
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            _set_buffer_sizes(sock)
            error_code = sock.connect_ex((host, port))
            if error_code not in (0, errno.EINPROGRESS):
                sock.close()
                return None
            _set_tcp_options(sock)
        except OSError:
            sock.close()
            return None
        handshake = CallerHandshake(self._secret, role)
        connection = Connection(sock, handshake, self._max_frame_bytes, tag)
        connection.shm_allowed = allow_shm
        connection.send_queue.append(memoryview(handshake.hello))
        connection.unsent_bytes = len(handshake.hello)
        self._register(connection)
        self._update_poll_events(connection)
        return connection

    def send(self, connection: Connection, buffers: Sequence[wire.Buffer]) -> None:
        """Send a frame, now as far as it goes, the rest when there is room."""
        if connection.fd not in self._connections:
            return
        if connection.shm_channel is not None:
            buffers = connection.shm_channel.publish(buffers) or buffers
        for buffer in buffers:
            if len(buffer):
                connection.send_queue.append(memoryview(buffer))
                connection.unsent_bytes += len(buffer)
        self._unflushed[connection.fd] = connection

    def close(self, connection: Connection) -> None:
        """Close a connection; its owner is told."""
        if self._connections.pop(connection.fd, None) is None:
            return
        self._unauthenticated.pop(connection.fd, None)
        with contextlib.suppress(KeyError, OSError):
            self._poller.unregister(connection.fd)
        connection.sock.close()
        connection.send_queue.clear()
        connection.shm_channel = None
        if connection.shm_offer is not None:
            connection.shm_offer.close()
        self.handler.on_close(connection)

    def run(self) -> None:
        """Until `running` is false."""
        next_tick = time.monotonic() + TICK_INTERVAL
        try:
            while self.running:
                for fd, events in self._wait_for_events(max(0.0, next_tick - time.monotonic())):
                    self._handle_events(fd, events)
                    if self._unflushed:
                        self._flush_all()
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + TICK_INTERVAL
                    self._close_late_handshakes(now)
                    self.handler.on_tick(now)
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
        if hasattr(self._poller, "close"):
            self._poller.close()

    def _handle_events(self, fd: int, events: int) -> None:
        connection = self._connections.get(fd)
        if connection is None:
            if self._listener is not None and fd == self._listener.fileno():
                self._accept()
            elif fd in self._callbacks:
                self._callbacks[fd]()
            return
        if events & WRITE:
            self._flush(connection)
        if events & ~WRITE and fd in self._connections:  # an error or a hang-up is read too
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
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                self.close(next(iter(self._unauthenticated.values())))
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                _set_tcp_options(sock)
            connection = Connection(sock, ListenerHandshake(self._secret), self._max_frame_bytes, None)
            connection.shm_allowed = self._allow_shm
            self._register(connection)
            self._unauthenticated[connection.fd] = connection

    def _register(self, connection: Connection) -> None:
        self._connections[connection.fd] = connection
        connection.poll_events = READ
        self._poller.register(connection.fd, READ)

    def _update_poll_events(self, connection: Connection) -> None:
        events = 0
        if connection.unsent_bytes <= MAX_UNSENT_BYTES or isinstance(connection.handshake, CallerHandshake):
            events |= READ
        if connection.send_queue:
            events |= WRITE
        if events != connection.poll_events:
            connection.poll_events = events
            self._poller.modify(connection.fd, events)

    def _flush_all(self) -> None:
        while self._unflushed:
            _, connection = self._unflushed.popitem()
            if connection.fd in self._connections:
                if connection.poll_events & WRITE or connection.handshake_buffer is not None:
                    self._update_poll_events(connection)
                else:
                    self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        send_queue = connection.send_queue
        try:
            while send_queue:
                buffers = [send_queue[position] for position in range(min(len(send_queue), _BUFFERS_PER_CALL))]
                count = connection.sock.sendmsg(buffers)
                connection.unsent_bytes -= count
                self.bytes_sent += count
                while count:
                    if count >= len(send_queue[0]):
                        count -= len(send_queue.popleft())
                    else:
                        send_queue[0] = send_queue[0][count:]
                        count = 0
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.close(connection)
            return
        self._update_poll_events(connection)

    def _read(self, connection: Connection) -> None:
        if connection.handshake_buffer is not None:
            self._continue_handshake(connection)
            return
        try:
            count = connection.sock.recv_into(connection.decoder.get_buffer())
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if not count:
            self.close(connection)
            return
        self.bytes_received += count
        try:
            frames = connection.decoder.buffer_updated(count)
        except (wire.WireError, ValueError, OverflowError, MemoryError):
            self.close(connection)
            return
        for frame in frames:
            if connection.fd not in self._connections:
                return
            if connection.shm_allowed and frame.kind in _SHM_KINDS:
                self._handle_shm_frame(connection, frame)
            else:
                self.handler.on_frame(connection, frame)

    def _handle_shm_frame(self, connection: Connection, frame: wire.Frame) -> None:
        """A frame about memory that both ends have, or one that lies in it."""
        try:
            if frame.kind == wire.SHM_REF and connection.shm_channel is not None:
                frame = connection.shm_channel.resolve(frame.meta)
            elif frame.kind == wire.SHM_OFFER_REPLY and connection.shm_offer is not None:
                connection.shm_channel, connection.shm_offer = connection.shm_offer.on_reply(frame.meta), None
                return
            elif frame.kind == wire.SHM_OFFER and connection.shm_channel is None:
                connection.shm_channel = shared_memory.accept_offer(frame.meta)
                # Said before anything is lent: `send` would not lend something so short.
                self.send(
                    connection, wire.encode(wire.SHM_OFFER_REPLY, 0, {"taken": connection.shm_channel is not None})
                )
                return
            else:
                raise wire.WireError(f"{frame} without memory to share")
        except (wire.WireError, ValueError, OverflowError, MemoryError):
            self.close(connection)
            return
        self.bytes_received += len(frame.raw)
        self.handler.on_frame(connection, frame)

    def _continue_handshake(self, connection: Connection) -> None:
        handshake, received = connection.handshake, connection.handshake_buffer
        assert received is not None
        try:
            chunk = connection.sock.recv(handshake.bytes_needed - len(received))
            if not chunk:
                raise SecretError("hung up")
            received += chunk
            if len(received) < handshake.bytes_needed:
                return
            connection.handshake_buffer = bytearray()
            reply = handshake.feed(bytes(received))
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, SecretError):
            self.close(connection)
            return
        if reply:
            connection.send_queue.append(memoryview(reply))
            connection.unsent_bytes += len(reply)
        if handshake.done:
            connection.handshake_buffer = None
            connection.role = handshake.role if isinstance(handshake, ListenerHandshake) else 0
            self._unauthenticated.pop(connection.fd, None)
        self._flush(connection)
        if handshake.done and connection.fd in self._connections:
            if connection.shm_allowed and isinstance(handshake, CallerHandshake):
                connection.shm_offer = shared_memory.make_offer(connection.sock)
                if connection.shm_offer is not None:
                    self.send(connection, connection.shm_offer.frame)
            self.handler.on_open(connection)

    def _close_late_handshakes(self, now: float) -> None:
        late = [
            candidate
            for candidate in self._connections.values()
            if candidate.handshake_buffer is not None and now - candidate.opened_at > HANDSHAKE_TIMEOUT
        ]
        for connection in late:
            self.close(connection)


def _make_poller() -> tuple[Any, Callable[[float], list[tuple[int, int]]]]:
    """What watches handles, and how it is waited on for so many seconds: bare, because `selectors` costs more than a small frame's work."""
    if hasattr(select, "epoll"):
        epoll = select.epoll()
        return epoll, epoll.poll
    poll = select.poll()
    return poll, lambda seconds: poll.poll(seconds * 1e3)


def _set_tcp_options(sock: socket.socket) -> None:
    """Small frames go at once; a peer that vanished without a word is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_USER_TIMEOUT", 5000), ("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _set_buffer_sizes(sock: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)


def host_name() -> str:
    """What tells this host from others."""
    return os.uname().nodename
