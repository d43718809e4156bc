"""The sockets of process groups: recorded while groups are made, so that a failing rank can close them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import termios
import time
from collections.abc import Iterator

#: The recorded sockets: descriptor to inode, since a descriptor may be used again.
_SOCKET_INODES: dict[int, int] = {}
#: Seconds without data in either direction after which no message is in flight, and how long to wait for that.
_IDLE_SECONDS, _IDLE_TIMEOUT = 0.25, 5.0


@contextlib.contextmanager
def record_connections() -> Iterator[None]:
    """Record the sockets that are opened inside."""
    before = _list_sockets()
    try:
        yield
    finally:
        _SOCKET_INODES.update(_list_sockets().items() - before.items())


def _list_sockets() -> dict[int, int]:
    inodes: dict[int, int] = {}
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed again
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as duplicate:
                    if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                        inodes[int(name)] = status.st_ino
    return inodes


def forget_connections() -> None:
    """Forget the recorded sockets, whose groups are destroyed."""
    _SOCKET_INODES.clear()


def close_connections() -> None:
    """Close this rank's connections to others, from any thread: whatever waits for them fails, which gloo's abort() does not achieve."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connection) for connection in _open_connections()]
        # gloo does not fail an operation whose message is cut off: its sender or receiver would never return.
        deadline = time.monotonic() + _IDLE_TIMEOUT
        while not all(map(_is_idle, connections)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _open_connections() -> Iterator[socket.socket]:
    """Copies of the recorded sockets that are still connected. Listening ones stay open: gloo's thread aborts when one closes."""
    for descriptor, inode in list(_SOCKET_INODES.items()):
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                connection = socket.socket(fileno=os.dup(descriptor))
                try:
                    connection.getpeername()
                except OSError:
                    connection.close()
                else:
                    yield connection


def _is_idle(connection: socket.socket) -> bool:
    """Whether nothing is in flight on it, nor has been for a while."""
    try:
        for queue in (termios.FIONREAD, termios.TIOCOUTQ):
            if any(fcntl.ioctl(connection, queue, bytes(4))):
                return False
        if not hasattr(socket, "TCP_INFO"):  # not on Linux
            return True
        # struct tcp_info: milliseconds since data was last sent and received
        tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    except OSError:  # closed by now
        return True
    sent, _, received = struct.unpack_from("3I", tcp_info, 44)
    return min(sent, received) >= 1000 * _IDLE_SECONDS
