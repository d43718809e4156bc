"""An event loop for the state machines: one thread, nothing blocks, every connection is authenticated before its frames are read."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

from echelon.errors import ServerError
from echelon.server.protocol import wire
from echelon.server.protocol.auth import HANDSHAKE_TIMEOUT, CallerHandshake, ListenerHandshake, SecretError
from echelon.server.protocol.connection import BaseConnection, Handshake, open_socket, parse_address, start_connecting

TICK_INTERVAL = 0.05
#: Accepted connections that may be unauthenticated at the same time.
MAX_UNAUTHENTICATED = 128
#: A peer that has this much unread is not read from.
MAX_UNSENT_BYTES = 1 << 26
READ, WRITE = select.POLLIN, select.POLLOUT
_SHM_KINDS = (wire.SHM_REF, wire.SHM_OFFER, wire.SHM_OFFER_REPLY)
_DAMAGE_ERRORS = (wire.WireError, ValueError, OverflowError, MemoryError)


class Connection(BaseConnection):
    """A connection that was opened with the handler's `tag`, or accepted with its number as tag."""

    __slots__ = ("decoder", "opened_at", "poll_events", "role", "shm_allowed", "tag")

    def __init__(self, sock: socket.socket, handshake: Handshake, *, tag: Any, shm_allowed: bool) -> None:
        super().__init__(sock, handshake)
        self.tag, self.shm_allowed = tag, shm_allowed
        self.decoder = wire.FrameDecoder()
        self.role = 0
        self.opened_at = time.monotonic()
        self.poll_events = 0


class ConnectionHandler(Protocol):
    """What a loop calls."""

    def on_open(self, connection: Connection) -> None: ...
    def on_frame(self, connection: Connection, frame: wire.Frame) -> None: ...
    def on_close(self, connection: Connection) -> None: ...
    def on_tick(self, now: float) -> None: ...


class EventLoop:
    """Call `run`; everything else is called from inside it. `allow_shm`: callers may offer shared memory for long frames."""

    def __init__(self, handler: ConnectionHandler, secret: bytes, *, allow_shm: bool = False) -> None:
        self.handler, self._secret, self._allow_shm = handler, secret, allow_shm
        self._poller, self._wait_for_events = _make_poller()
        self._connections: dict[int, Connection] = {}
        self._unauthenticated: dict[int, Connection] = {}
        #: Accepted and authenticated connections, by tag.
        self.peers: dict[Any, Connection] = {}
        self._last_peer = 0
        self._listener: socket.socket | None = None
        #: Connections with frames queued since an event began: frames for one peer are sent together.
        self._unflushed: dict[int, Connection] = {}
        self._callbacks: dict[int, Callable[[], None]] = {}
        self.running = True
        self.bytes_sent = 0
        self.bytes_received = 0

    def listen(self, address: str, *, advertise: str | None = None) -> str:
        """Accept connections. Returns the address for others: its port is never 0, its host `advertise` if given."""
        host, port = parse_address(address)
        self._listener = listener = open_socket(host)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            advice = "choose another address or port 0"
            raise ServerError(f"{host}:{port}: cannot listen there ({error.strerror}); {advice}") from None
        self._poller.register(listener, READ)
        name = listener.getsockname()
        return f"{advertise or (f'[{name[0]}]' if ':' in host else name[0])}:{name[1]}"

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` when a file can be read."""
        self._callbacks[fd] = callback
        self._poller.register(fd, READ)

    def unwatch(self, fd: int) -> None:
        if self._callbacks.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def connect(self, address: str, role: int, tag: Any, *, allow_shm: bool = False) -> Connection | None:
        """Connect to an address: `on_open` follows once both ends are authenticated, `on_close` if that fails; None if it fails at once.

        `allow_shm`: offer shared memory for long frames.
        """
        try:
            sock = start_connecting(address)
        except OSError:
            return None
        _set_tcp_options(sock)
        connection = Connection(sock, CallerHandshake(self._secret, role), tag=tag, shm_allowed=allow_shm)
        self._register(connection)
        self._update_poll_events(connection)
        return connection

    def send(self, connection: Connection, buffers: list[wire.Buffer]) -> None:
        """Send a frame at the end of this event, as far as the socket takes it, and the rest when there is room."""
        if connection.fd in self._connections:
            connection.queue(buffers)
            self._unflushed[connection.fd] = connection

    def close(self, connection: Connection) -> None:
        """Close a connection and tell the handler."""
        if self._connections.pop(connection.fd, None) is None:
            return
        self._unauthenticated.pop(connection.fd, None)
        self.peers.pop(connection.tag, None)
        with contextlib.suppress(KeyError, OSError):
            self._poller.unregister(connection.fd)
        connection.close()
        self.handler.on_close(connection)

    def run(self) -> None:
        """Run until `running` is false."""
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
        """Close all sockets without telling the handler."""
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
                self._accept(self._listener)
            elif fd in self._callbacks:
                self._callbacks[fd]()
            return
        if events & WRITE:
            self._flush(connection)
        if events & ~WRITE and fd in self._connections:  # reading also finds errors and hang-ups
            self._read(connection)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(16):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:
                time.sleep(0.01)  # out of file descriptors: the poller would report it again at once
                return
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                self.close(next(iter(self._unauthenticated.values())))
            sock.setblocking(False)
            _set_tcp_options(sock)
            connection = Connection(sock, ListenerHandshake(self._secret), tag=None, shm_allowed=self._allow_shm)
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
                if connection.poll_events & WRITE or not connection.is_ready:
                    self._update_poll_events(connection)
                else:
                    self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        try:
            self.bytes_sent += connection.write()
        except OSError:
            self.close(connection)
            return
        self._update_poll_events(connection)

    def _read(self, connection: Connection) -> None:
        if not connection.is_ready:
            self._continue_handshake(connection)
            return
        try:
            count = connection.sock.recv_into(connection.decoder.get_buffer())
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self.close(connection)
            return
        self.bytes_received += count
        try:
            frames = connection.decoder.buffer_updated(count)
        except _DAMAGE_ERRORS:
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
        try:
            referenced_frame = connection.handle_shm_frame(frame)
        except _DAMAGE_ERRORS:
            self.close(connection)
            return
        if referenced_frame is None:
            self._unflushed[connection.fd] = connection
        else:
            self.bytes_received += len(referenced_frame.raw)
            self.handler.on_frame(connection, referenced_frame)

    def _continue_handshake(self, connection: Connection) -> None:
        try:
            connection.continue_handshake()
        except BlockingIOError:
            return
        except (OSError, EOFError, SecretError):
            self.close(connection)
            return
        self._flush(connection)
        if not connection.is_ready or connection.fd not in self._connections:
            return
        self._unauthenticated.pop(connection.fd, None)
        if isinstance(connection.handshake, ListenerHandshake):
            connection.role = connection.handshake.role
            self._last_peer = connection.tag = self._last_peer + 1
            self.peers[connection.tag] = connection
        elif connection.shm_allowed:
            connection.offer_shm()
            self._unflushed[connection.fd] = connection
        self.handler.on_open(connection)

    def _close_late_handshakes(self, now: float) -> None:
        for connection in list(self._connections.values()):
            if not connection.is_ready and now - connection.opened_at > HANDSHAKE_TIMEOUT:
                self.close(connection)


def _make_poller() -> tuple[Any, Callable[[float], list[tuple[int, int]]]]:
    """A poller and its wait function, in seconds: bare, because `selectors` costs more than the work of a small frame."""
    if hasattr(select, "epoll"):
        epoll = select.epoll()
        return epoll, epoll.poll
    poll = select.poll()
    return poll, lambda seconds: poll.poll(seconds * 1e3)


def _set_tcp_options(sock: socket.socket) -> None:
    """Send small frames at once, and notice peers that vanish without closing."""
    options = {"TCP_NODELAY": 1, "TCP_USER_TIMEOUT": 5000, "TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in options.items():
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
