"""A worker's connection to the controller: a thread that joins, renews the lease, and receives every new map.

The data path never waits for it: while the controller is down, the last map stays in use.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from echelon.errors import EchelonError, ServerError
from echelon.server.protocol import wire
from echelon.server.protocol.auth import WORKER, HandshakeAborted, SecretError, authenticate
from echelon.server.protocol.connection import parse_address
from echelon.server.protocol.shard_map import ShardMap

#: Seconds. A worker leaves the clocks after 2 s without a heartbeat.
HEARTBEAT_INTERVAL = 0.5
#: Seconds between attempts to connect.
RETRY_INTERVAL = 0.1


@dataclass(slots=True)
class _PendingRequest:
    kind: int
    meta: dict[str, Any]
    reply: Future[wire.Frame]
    request_id: int = 0


class ControllerClient:
    """`notify_fd` becomes readable when there is a new map, which `take_new_map()` returns, or a reply."""

    def __init__(self, address: str, secret: bytes, join_meta: Mapping[str, Any]) -> None:
        self.address, self._host_and_port = address, parse_address(address)
        self._secret, self._join_meta = secret, dict(join_meta)
        self.incarnation = 0
        self.settings: dict[str, Any] = {}
        self.specs: list[dict[str, Any]] = []
        #: Why the controller is not connected.
        self.last_error = "not tried yet"
        self.notify_fd, self._notify_write_fd = os.pipe()
        self._wakeup_read_fd, self._wakeup_write_fd = os.pipe()
        for fd in (self.notify_fd, self._notify_write_fd, self._wakeup_read_fd):
            os.set_blocking(fd, False)
        self._lock = threading.Lock()
        self._new_map: ShardMap | None = None
        self._map_version = -1
        self._pending_requests: list[_PendingRequest] = []
        self._fatal_error: EchelonError | None = None
        self._closing = False
        self.connected = False
        self._thread = threading.Thread(target=self._run, name="echelon-controller-client", daemon=True)
        self._thread.start()

    def take_new_map(self) -> ShardMap | None:
        """The newest map, if it arrived since the last call. Raises what ended the thread."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.notify_fd, 4096)
        if self._fatal_error is not None:
            raise self._fatal_error
        with self._lock:
            new_map, self._new_map = self._new_map, None
            return new_map

    def send_request(self, kind: int, meta: dict[str, Any]) -> Future[wire.Frame]:
        """Send an idempotent request: it is sent again after a reconnection. Raises what ended the thread."""
        if self._fatal_error is not None:
            raise self._fatal_error
        request = _PendingRequest(kind=kind, meta=meta, reply=Future())
        with self._lock:
            self._pending_requests.append(request)
        os.write(self._wakeup_write_fd, b"!")
        return request.reply

    def cancel_request(self, reply: Future[wire.Frame]) -> None:
        """Stop waiting for this reply."""
        with self._lock:
            self._pending_requests = [request for request in self._pending_requests if request.reply is not reply]

    def close(self, *, leave: bool = True) -> None:
        """Leave the job, or only disconnect, and end the thread."""
        if leave and self.connected and not self._closing:
            with contextlib.suppress(Exception):
                self.send_request(wire.LEAVE, {}).result(timeout=1.0)
        self._closing = True
        with contextlib.suppress(OSError):
            os.write(self._wakeup_write_fd, b"!")
        self._thread.join(timeout=5.0)
        for fd in (self.notify_fd, self._wakeup_write_fd):
            with contextlib.suppress(OSError):
                os.close(fd)

    def _run(self) -> None:
        try:
            while not self._closing and self._fatal_error is None:
                try:
                    self._run_connection()
                except (OSError, EOFError, EchelonError, KeyError, TypeError, ValueError) as error:
                    self.last_error = str(error) or "the connection ended"
                    if isinstance(error, SecretError) and not isinstance(error, HandshakeAborted):
                        self._fatal_error = SecretError(f"controller {self.address}: {error}")
                self.connected = False
                if not self._closing and self._fatal_error is None:
                    time.sleep(RETRY_INTERVAL)
        finally:
            self._notify()
            # By the thread that uses them: `close` does not wait forever, and their numbers could be reused by then.
            os.close(self._notify_write_fd)
            os.close(self._wakeup_read_fd)

    def _run_connection(self) -> None:
        with socket.create_connection(self._host_and_port, timeout=5.0) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            authenticate(connection, self._secret, WORKER)
            self._last_request_id = 0
            join_id = self._send(connection, wire.JOIN, self._join_meta)
            while (reply := wire.receive(connection)).request_id != join_id:
                pass
            if reply.kind == wire.REFUSED:
                self._fatal_error = ServerError(f"controller {self.address}: {reply.meta.get('message')}")
                return
            self.connected, self.last_error = True, "it is connected but does not reply"
            # The controller numbers each incarnation of a worker; a reconnection keeps the number.
            self._join_meta["incarnation"] = self.incarnation = int(reply.meta["incarnation"])
            self._receive_map(reply)
            for request in self._pending_requests:
                request.request_id = 0
            watch_id = self._send(connection, wire.WATCH, {"after": self._map_version})
            last_heartbeat = time.monotonic()
            poller = select.poll()
            poller.register(connection, select.POLLIN)
            poller.register(self._wakeup_read_fd, select.POLLIN)
            while not self._closing:
                self._send_new_requests(connection)
                ready = dict(poller.poll(max(0.0, last_heartbeat + HEARTBEAT_INTERVAL - time.monotonic()) * 1e3))
                if self._wakeup_read_fd in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakeup_read_fd, 4096)
                if connection.fileno() in ready:
                    frame = wire.receive(connection)
                    if frame.kind == wire.MAP:
                        self._receive_map(frame)
                        if frame.request_id == watch_id:
                            watch_id = self._send(connection, wire.WATCH, {"after": self._map_version})
                    else:
                        self._complete_request(frame)
                if time.monotonic() >= last_heartbeat + HEARTBEAT_INTERVAL:
                    last_heartbeat = time.monotonic()
                    self._send(connection, wire.HEARTBEAT, {})

    def _send(self, connection: socket.socket, kind: int, meta: dict[str, Any]) -> int:
        self._last_request_id += 1
        wire.send(connection, wire.encode(kind, self._last_request_id, meta))
        return self._last_request_id

    def _send_new_requests(self, connection: socket.socket) -> None:
        with self._lock:
            new_requests = [request for request in self._pending_requests if not request.request_id]
        for request in new_requests:
            request.request_id = self._send(connection, request.kind, request.meta)

    def _complete_request(self, frame: wire.Frame) -> None:
        with self._lock:
            for request in list(self._pending_requests):
                if request.request_id == frame.request_id:
                    self._pending_requests.remove(request)
                    request.reply.set_result(frame)
        self._notify()

    def _receive_map(self, frame: wire.Frame) -> None:
        new_map = ShardMap.from_document(frame.meta["map"])
        self.specs = frame.meta.get("specs", self.specs)
        self.settings = frame.meta.get("settings", self.settings)
        with self._lock:
            if new_map.version > self._map_version:
                self._new_map, self._map_version = new_map, new_map.version
        self._notify()

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._notify_write_fd, b"!")
