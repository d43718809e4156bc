"""Long frames between two processes of one machine: by memory that both have, and a short frame over the socket that says where.

Whoever called offers it once both have proved themselves: SHM_OFFER {pid, handle, token} names a memory file that cannot shrink; the other
end opens it, finds the token in it, and answers SHM_OFFER_REPLY {taken}. Where that fails (another machine, container or user, or no Linux) all
frames go by the socket, as do those that are short and those for which there is no room: nobody ever waits for memory.

A frame lies in the sender's half as it would travel, and is announced by SHM_REF {at, size, slot, turn}, in its place among the other
frames. The receiver reads it where it lies and gives the slot back when nothing looks at the frame any more. Neither end's death harms
the other: memory stays while somebody has it, and frames that were not announced were never sent.
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

#: Bytes of each direction: a few batches. Memory is taken as it is first used, the lowest first.
BYTES_PER_DIRECTION = 4 << 20
#: Shorter frames go by the socket: two system calls cost as much as the copies.
MIN_FRAME_BYTES = 32 << 10
SLOTS_PER_DIRECTION = 32
_TOKEN_BYTES = 32
#: In front of the halves: the token, then how often each slot of either half was given back.
_PREFIX_BYTES = 4096
_COUNTERS_OFFSET = 64


class _PublishedFrame(NamedTuple):
    """A frame that the other end may still look at."""

    start: int
    end: int
    slot: int
    generation: int


class SharedMemoryChannel:
    """One connection's memory, as one of its ends has it: `first` for the end that made it."""

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
        """Put a frame where the other end sees it: what to send instead. None: it is short, or there is no room for it now."""
        size = wire.frame_size(buffers)
        if not MIN_FRAME_BYTES <= size <= BYTES_PER_DIRECTION:
            return None
        released = self._released_by_peer
        self._published = published = [frame for frame in self._published if released[frame.slot] != frame.generation]
        if len(published) == SLOTS_PER_DIRECTION:
            return None
        offset = position = 0
        for frame in published:  # in the order in which they lie
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
        """The frame that the other end announced; its slot is given back when the last view of it is gone."""
        offset, size, slot, generation = (meta.get(name) for name in ("at", "size", "slot", "turn"))
        if not (type(offset) is type(size) is type(slot) is type(generation) is int):
            raise wire.WireError("SHM_REF: at, size, slot and turn are numbers")
        if (
            not (
                0 <= offset < offset + size <= BYTES_PER_DIRECTION
                and 0 <= slot < SLOTS_PER_DIRECTION
                and 0 < generation < 1 << 62
            )
            or offset % wire.ALIGNMENT
        ):
            raise wire.WireError(
                f"SHM_REF: {size} bytes at {offset} in slot {slot} are not in the memory that is shared"
            )
        if generation <= self._last_generations[slot]:
            raise wire.WireError(f"SHM_REF: turn {generation} of slot {slot} after {self._last_generations[slot]}")
        self._last_generations[slot] = generation
        raw = np.frombuffer(self._receive_area, np.uint8, size, offset)
        released, pid = self._released_by_us, self._pid

        def release_slot(_: object) -> None:
            if os.getpid() == pid:  # a forked child's views are not ours, and the memory is the parent's
                released[slot] = generation

        self._frames_in_use[slot] = weakref.ref(raw, release_slot)
        return wire.parse(raw)


class SharedMemoryOffer:
    """Memory that was offered and not answered yet."""

    def __init__(self, fd: int, area: mmap.mmap, token: bytes) -> None:
        self._fd, self.area, self._token = fd, area, token

    @property
    def frame(self) -> list[wire.Buffer]:
        """What to say to the other end."""
        return wire.encode(wire.SHM_OFFER, 0, {"pid": os.getpid(), "handle": self._fd, "token": self._token.hex()})

    def on_reply(self, meta: dict[str, Any]) -> SharedMemoryChannel | None:
        """The other end's word: what both have, if it took it."""
        self.close()
        return SharedMemoryChannel(self.area, is_creator=True) if meta.get("taken") is True else None

    def close(self) -> None:
        """No longer to be had by others."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def make_offer(connection: socket.socket) -> SharedMemoryOffer | None:
    """Memory to share over this connection; None where it leads to another machine, or this one cannot."""
    if not hasattr(os, "memfd_create"):
        return None
    fd = -1
    try:
        if connection.getpeername()[0] != connection.getsockname()[0]:
            return None
        fd = os.memfd_create("echelon", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _PREFIX_BYTES + 2 * BYTES_PER_DIRECTION)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        area = mmap.mmap(fd, _PREFIX_BYTES + 2 * BYTES_PER_DIRECTION)
    except OSError:
        if fd >= 0:
            os.close(fd)
        return None
    token = secrets.token_bytes(_TOKEN_BYTES)
    area[:_TOKEN_BYTES] = token
    return SharedMemoryOffer(fd, area, token)


def accept_offer(meta: dict[str, Any]) -> SharedMemoryChannel | None:
    """Memory that a caller offered; None where it cannot be had from here, or is not what was offered."""
    pid, peer_fd, token = meta.get("pid"), meta.get("handle"), meta.get("token")
    if type(pid) is not int or type(peer_fd) is not int or type(token) is not str:
        raise wire.WireError("SHM_OFFER: pid, handle and token are expected")
    path, size, fd = f"/proc/{pid}/fd/{peer_fd}", _PREFIX_BYTES + 2 * BYTES_PER_DIRECTION, -1
    try:
        file_stat = os.stat(path)
        if not stat.S_ISREG(file_stat.st_mode) or file_stat.st_size != size:
            return None
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        # A file that could shrink would end us with a signal when we read what is gone.
        if os.fstat(fd).st_size != size or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return None
        area = mmap.mmap(fd, size)
        # The number of a process may be another's where we are.
        return (
            SharedMemoryChannel(area, is_creator=False)
            if secrets.compare_digest(area[:_TOKEN_BYTES].hex(), token)
            else None
        )
    except (OSError, OverflowError, TypeError, ValueError):
        return None
    finally:
        if fd >= 0:
            os.close(fd)
