"""A worker's connections to all servers, polled by one thread and reopened when they end.

Requests that were in flight on a lost connection are returned to the owner, who sends them again.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from echelon.errors import EchelonError
from echelon.server.client.connection import Request, ServerConnection

#: Seconds for connecting and the handshake, before a new attempt.
DIAL_TIMEOUT = 3.0
#: Seconds until the next attempt: at first, and at most.
MIN_REDIAL_DELAY, MAX_REDIAL_DELAY = 0.01, 0.25


class ConnectionPool:
    """Calls `on_ready(server)` when a connection can be used, and `on_lost(server, requests)` when one ended."""

    def __init__(
        self, secret: bytes, *, on_ready: Callable[[str], None], on_lost: Callable[[str, list[Request]], None]
    ) -> None:
        self._secret, self._on_ready, self._on_lost = secret, on_ready, on_lost
        self._addresses: dict[str, str] = {}
        self._connections: dict[str, ServerConnection] = {}
        self._connection_by_fd: dict[int, ServerConnection] = {}
        self._poller = select.poll()
        self._watched: tuple[int, Callable[[], None]] | None = None
        #: Servers without a connection: when to dial next, and the delay of the dial after that.
        self._dial_times: dict[str, float] = {}
        self._redial_delays: dict[str, float] = {}
        self._failed_connections: list[tuple[ServerConnection, BaseException]] = []
        self._closed_chunks_received = 0
        #: Why a server could not be reached.
        self.last_errors: dict[str, str] = {}

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` whenever this file can be read."""
        self._watched = (fd, callback)
        self._poller.register(fd, select.POLLIN)

    def set_addresses(self, addresses: dict[str, str]) -> None:
        """Set where the servers are: close connections to any other address, and open missing ones."""
        for server, connection in list(self._connections.items()):
            if addresses.get(server) != connection.address:
                self._close_connection(connection, "it left the map")
        for server in set(self._dial_times) | set(addresses):
            if addresses.get(server) != self._addresses.get(server):
                self._dial_times.pop(server, None)
                self._redial_delays.pop(server, None)
        self._addresses = dict(addresses)
        for server in addresses:
            if server not in self._connections and server not in self._dial_times:
                self._dial(server)

    @property
    def chunks_received(self) -> int:
        """A counter that grows while long replies arrive."""
        return self._closed_chunks_received + sum(each.chunks_received for each in self._connections.values())

    def is_ready(self, server: str) -> bool:
        connection = self._connections.get(server)
        return connection is not None and connection.is_ready

    def send_request(self, server: str, request: Request) -> None:
        """Send a request to a server that is ready. If its connection turns out to be dead, the next `poll` reports it."""
        connection = self._connections[server]
        try:
            connection.send_request(request)
            self._poller.modify(connection.fd, connection.poll_events)
        except OSError as error:
            self._failed_connections.append((connection, error))

    def abandon(self, request: Request) -> None:
        """Ignore the reply to this request."""
        request.abandoned = True
        connection = self._connections.get(request.server)
        if connection is not None and connection.receiving_request is request:
            self._failed_connections.append((connection, EOFError("its reply was abandoned")))

    def poll(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for events, and handle them."""
        failed, self._failed_connections = self._failed_connections, []
        for connection, error in failed:
            self._close_and_redial(connection, error)
        if self._dial_times:
            timeout = min(timeout, max(0.0, min(self._dial_times.values()) - time.monotonic()))
        if failed:
            timeout = 0.0
        for fd, events in self._poller.poll(timeout * 1e3):
            if self._watched is not None and fd == self._watched[0]:
                self._watched[1]()
            elif fd in self._connection_by_fd:
                self._handle_events(self._connection_by_fd[fd], events)
        if self._dial_times or not all(connection.is_ready for connection in self._connections.values()):
            self._redial_due()

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._unregister(connection)
        self._addresses, self._dial_times = {}, {}

    def _handle_events(self, connection: ServerConnection, events: int) -> None:
        was_ready = connection.is_ready
        try:
            if events & select.POLLOUT:
                connection.write()
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                connection.read()
        except (OSError, EOFError, EchelonError) as error:
            self._close_and_redial(connection, error)
            return
        except BaseException as error:  # a reply's handler was interrupted: send all unanswered requests again
            self._failed_connections.append((connection, error))
            raise
        if self._connections.get(connection.server) is not connection:
            return
        self._poller.modify(connection.fd, connection.poll_events)
        if connection.is_ready and not was_ready:
            self.last_errors.pop(connection.server, None)
            self._redial_delays.pop(connection.server, None)
            self._on_ready(connection.server)

    def _close_and_redial(self, connection: ServerConnection, error: BaseException) -> None:
        if self._connections.get(connection.server) is connection:
            self._close_connection(connection, str(error) or "the connection ended")
            self._schedule_redial(connection.server)

    def _schedule_redial(self, server: str) -> None:
        if server in self._addresses:
            delay = self._redial_delays.get(server, MIN_REDIAL_DELAY)
            self._dial_times[server] = time.monotonic() + delay
            self._redial_delays[server] = min(2 * delay, MAX_REDIAL_DELAY)

    def _redial_due(self) -> None:
        """Give up slow dials, and dial again what is due."""
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if not connection.is_ready and now - connection.dialed_at > DIAL_TIMEOUT:
                self._close_and_redial(connection, TimeoutError(f"no handshake within {DIAL_TIMEOUT:g} s"))
        for server, dial_time in list(self._dial_times.items()):
            if dial_time <= now:
                self._dial(server)

    def _dial(self, server: str) -> None:
        self._dial_times.pop(server, None)
        try:
            connection = ServerConnection(server, self._addresses[server], self._secret)
        except OSError as error:
            self.last_errors[server] = str(error)
            self._schedule_redial(server)
            return
        self._connections[server] = self._connection_by_fd[connection.fd] = connection
        self._poller.register(connection.fd, connection.poll_events)

    def _close_connection(self, connection: ServerConnection, reason: str) -> None:
        self.last_errors[connection.server] = reason
        self._unregister(connection)
        requests = [request for request in connection.pending_requests.values() if not request.abandoned]
        self._on_lost(connection.server, requests)

    def _unregister(self, connection: ServerConnection) -> None:
        self._closed_chunks_received += connection.chunks_received
        del self._connections[connection.server], self._connection_by_fd[connection.fd]
        self._poller.unregister(connection.fd)
        connection.close()
