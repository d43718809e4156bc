"""One end of a non-blocking connection: its handshake, the frames that wait to be sent, the memory that both ends share."""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Sequence

from echelon.errors import ServerError
from echelon.server.protocol import shared_memory, wire
from echelon.server.protocol.auth import CallerHandshake, ListenerHandshake

Handshake = CallerHandshake | ListenerHandshake
#: Bytes asked of the kernel for each direction of a connection; it grants at most what net.core allows.
_SOCKET_BUFFER_BYTES = 4 << 20


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port"."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ServerError(f"{address!r} is no address; write host:port")
    return host.strip("[]"), int(port)


def open_socket(host: str) -> socket.socket:
    """A socket for connections with this host. Its buffers are set before it connects, so that TCP scales its window to them."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
    return sock


def start_connecting(address: str) -> socket.socket:
    """A socket that is connecting to an address; OSError if that fails at once."""
    host, port = parse_address(address)
    sock = open_socket(host)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex((host, port))
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
    except OSError:
        sock.close()
        raise
    return sock


class BaseConnection:
    """A socket with its handshake, send queue and shared memory. `is_ready` once both ends are authenticated."""

    __slots__ = (
        "fd", "handshake", "handshake_buffer", "is_ready", "send_queue", "shm_channel", "shm_offer", "sock", "unsent_bytes",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, handshake: Handshake) -> None:
        self.sock, self.handshake, self.fd = sock, handshake, sock.fileno()
        self.is_ready = False
        self.handshake_buffer = b""
        self.send_queue: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.shm_channel: shared_memory.SharedMemoryChannel | None = None
        self.shm_offer: shared_memory.SharedMemoryOffer | None = None
        if isinstance(handshake, CallerHandshake):
            self.queue([handshake.hello])

    def continue_handshake(self) -> None:
        """Receive what has arrived of the handshake and queue the reply. EOFError, OSError or SecretError if it fails."""
        chunk = self.sock.recv(self.handshake.bytes_needed - len(self.handshake_buffer))
        if not chunk:
            raise EOFError
        self.handshake_buffer += chunk
        if len(self.handshake_buffer) == self.handshake.bytes_needed:
            received, self.handshake_buffer = self.handshake_buffer, b""
            self.queue([self.handshake.feed(received)])
            self.is_ready = self.handshake.done

    def queue(self, buffers: Sequence[wire.Buffer]) -> None:
        """Send these bytes with the next `write`: through shared memory if they are a long frame and there is room for it."""
        if self.shm_channel is not None:
            buffers = self.shm_channel.publish(buffers) or buffers
        for buffer in buffers:
            if len(buffer):
                self.send_queue.append(memoryview(buffer))
                self.unsent_bytes += len(buffer)

    def write(self) -> int:
        """Send what the socket takes now. Returns the number of bytes."""
        total = 0
        try:
            while self.send_queue:
                total += wire.send_some(self.sock, self.send_queue)
        except BlockingIOError:
            pass
        self.unsent_bytes -= total
        return total

    def offer_shm(self) -> None:
        """Offer the other end memory for long frames, if it may be on this machine."""
        self.shm_offer = shared_memory.make_offer(self.sock)
        if self.shm_offer is not None:
            self.queue(self.shm_offer.frame)

    def handle_shm_frame(self, frame: wire.Frame) -> wire.Frame | None:
        """The frame to which a frame about shared memory refers, or None if it negotiates."""
        if frame.kind == wire.SHM_REF and self.shm_channel is not None:
            return self.shm_channel.resolve(frame.meta)
        if frame.kind == wire.SHM_OFFER_REPLY and self.shm_offer is not None:
            self.shm_channel, self.shm_offer = self.shm_offer.on_reply(frame.meta), None
        elif frame.kind == wire.SHM_OFFER and self.shm_channel is None:
            self.shm_channel = shared_memory.accept_offer(frame.meta)
            self.queue(wire.encode(wire.SHM_OFFER_REPLY, 0, {"taken": self.shm_channel is not None}))
        else:
            raise wire.WireError(f"{frame} without shared memory")
        return None

    def close(self) -> None:
        self.sock.close()
        self.send_queue.clear()
        self.shm_channel = None
        if self.shm_offer is not None:
            self.shm_offer.close()
