"""Long frames between two processes of one machine: through shared memory, announced by short frames over the socket.

The caller offers memory once both ends are authenticated: SHM_OFFER {pid, handle, token} names a memory file that cannot shrink; the
other end opens it, finds the token in it, and replies SHM_OFFER_REPLY {taken}. If that fails (another machine, container or user, or no
Linux) all frames use the socket, as do short ones and those for which there is no room: nobody ever waits for memory.

A frame lies in the sender's half in wire format, and is announced by SHM_REF {at, size, slot, turn} in its place among the other
frames. The receiver reads it in place and releases the slot when the last view of the frame is gone. Neither end's death harms the other:
memory stays while somebody maps it, and frames that were not announced were never sent.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import stat
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from echelon.server.protocol import wire

#: A few batches. Memory is committed on first use, lowest first.
BYTES_PER_DIRECTION = 4 << 20
#: Shorter frames use the socket: the copies cost no more than two system calls.
MIN_FRAME_BYTES = 32 << 10
SLOTS_PER_DIRECTION = 32
_TOKEN_BYTES = 32
#: Before the halves: the token, then the last released generation of each slot of either half.
_PREFIX_BYTES = 4096
_COUNTERS_OFFSET = 64
_AREA_BYTES = _PREFIX_BYTES + 2 * BYTES_PER_DIRECTION


class _PublishedFrame(NamedTuple):
    """A frame that the other end may still read."""

    start: int
    end: int
    slot: int
    generation: int


class SharedMemoryChannel:
    """One end of a connection's shared memory."""

    def __init__(self, area: mmap.mmap, *, is_creator: bool) -> None:
        view, counters = memoryview(area), memoryview(area)[_COUNTERS_OFFSET:_PREFIX_BYTES].cast("Q")
        halves = view[_PREFIX_BYTES : _PREFIX_BYTES + BYTES_PER_DIRECTION], view[_PREFIX_BYTES + BYTES_PER_DIRECTION :]
        released = counters[:SLOTS_PER_DIRECTION], counters[SLOTS_PER_DIRECTION : 2 * SLOTS_PER_DIRECTION]
        self._send_area, self._receive_area = halves if is_creator else halves[::-1]
        self._released_by_peer, self._released_by_us = released if is_creator else released[::-1]
        self._published: list[_PublishedFrame] = []
        self._generations = [0] * SLOTS_PER_DIRECTION
        self._frames_in_use: dict[int, weakref.ref[np.ndarray]] = {}
        self._last_generations = [0] * SLOTS_PER_DIRECTION
        self._pid = os.getpid()

    def publish(self, buffers: Sequence[wire.Buffer]) -> list[wire.Buffer] | None:
        """Write a frame into shared memory. Returns the frame to send instead; None if it is short or there is no room for it now."""
        size = wire.frame_size(buffers)
        if not MIN_FRAME_BYTES <= size <= BYTES_PER_DIRECTION:
            return None
        released = self._released_by_peer
        self._published = published = [frame for frame in self._published if released[frame.slot] != frame.generation]
        if len(published) == SLOTS_PER_DIRECTION:
            return None
        offset = position = 0
        for frame in published:  # in address order
            if frame.start - offset >= size:
                break
            offset, position = -(-frame.end // wire.ALIGNMENT) * wire.ALIGNMENT, position + 1
        if offset + size > BYTES_PER_DIRECTION:
            return None
        used_slots = {frame.slot for frame in published}
        slot = next(slot for slot in range(SLOTS_PER_DIRECTION) if slot not in used_slots)
        self._generations[slot] += 1
        frame = _PublishedFrame(offset, offset + size, slot, self._generations[slot])
        published.insert(position, frame)
        for buffer in buffers:
            self._send_area[offset : offset + len(buffer)] = buffer
            offset += len(buffer)
        return wire.encode(wire.SHM_REF, 0, {"at": frame.start, "size": size, "slot": slot, "turn": frame.generation})

    def resolve(self, meta: dict[str, Any]) -> wire.Frame:
        """The frame that the other end announced; its slot is released when its last view is gone."""
        offset, size, slot, generation = (meta.get(name) for name in ("at", "size", "slot", "turn"))
        if not (type(offset) is type(size) is type(slot) is type(generation) is int):
            raise wire.WireError("SHM_REF: at, size, slot and turn are integers")
        is_inside = 0 <= offset < offset + size <= BYTES_PER_DIRECTION and offset % wire.ALIGNMENT == 0
        if not (is_inside and 0 <= slot < SLOTS_PER_DIRECTION and 0 < generation < 1 << 62):
            raise wire.WireError(f"SHM_REF: {size} bytes at {offset} in slot {slot} are not in the shared memory")
        if generation <= self._last_generations[slot]:
            raise wire.WireError(f"SHM_REF: turn {generation} of slot {slot} after {self._last_generations[slot]}")
        self._last_generations[slot] = generation
        raw = np.frombuffer(self._receive_area, np.uint8, size, offset)
        released, pid = self._released_by_us, self._pid

        def release_slot(_: object) -> None:
            if os.getpid() == pid:  # not in a forked child: the memory is the parent's
                released[slot] = generation

        self._frames_in_use[slot] = weakref.ref(raw, release_slot)
        return wire.parse(raw)


class SharedMemoryOffer:
    """Memory that was offered to the other end, which has not replied yet."""

    def __init__(self, fd: int, area: mmap.mmap, token: bytes) -> None:
        self._fd, self.area, self._token = fd, area, token

    @property
    def frame(self) -> list[wire.Buffer]:
        return wire.encode(wire.SHM_OFFER, 0, {"pid": os.getpid(), "handle": self._fd, "token": self._token.hex()})

    def on_reply(self, meta: dict[str, Any]) -> SharedMemoryChannel | None:
        """The channel, if the other end took the offer."""
        self.close()
        return SharedMemoryChannel(self.area, is_creator=True) if meta.get("taken") is True else None

    def close(self) -> None:
        """Withdraw the offer."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def make_offer(connection: socket.socket) -> SharedMemoryOffer | None:
    """Memory to share over this connection; None if it leads to another machine, or this one has no memory files."""
    if not hasattr(os, "memfd_create"):
        return None
    fd = -1
    try:
        if connection.getpeername()[0] != connection.getsockname()[0]:
            return None
        fd = os.memfd_create("echelon", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _AREA_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        area = mmap.mmap(fd, _AREA_BYTES)
    except OSError:
        if fd >= 0:
            os.close(fd)
        return None
    token = secrets.token_bytes(_TOKEN_BYTES)
    area[:_TOKEN_BYTES] = token
    return SharedMemoryOffer(fd, area, token)


def accept_offer(meta: dict[str, Any]) -> SharedMemoryChannel | None:
    """The memory that a caller offered; None if it cannot be opened here, or is not what was offered."""
    pid, peer_fd, token = meta.get("pid"), meta.get("handle"), meta.get("token")
    if type(pid) is not int or type(peer_fd) is not int or type(token) is not str:
        raise wire.WireError("SHM_OFFER: pid, handle and token are expected")
    path, fd = f"/proc/{pid}/fd/{peer_fd}", -1
    try:
        file_stat = os.stat(path)
        if not stat.S_ISREG(file_stat.st_mode) or file_stat.st_size != _AREA_BYTES:
            return None
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        # Reading the lost part of a file that shrank would kill this process.
        if os.fstat(fd).st_size != _AREA_BYTES or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return None
        area = mmap.mmap(fd, _AREA_BYTES)
        # The pid may be another process's in this namespace.
        is_offered = secrets.compare_digest(area[:_TOKEN_BYTES].hex(), token)
        return SharedMemoryChannel(area, is_creator=False) if is_offered else None
    except (OSError, OverflowError, TypeError, ValueError):
        return None
    finally:
        if fd >= 0:
            os.close(fd)
