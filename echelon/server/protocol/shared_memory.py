"""Long frames between two processes of one machine: by memory that both have, and a short frame over the socket that says where.

Whoever called offers it once both have proved themselves: OFFER {pid, handle, token} names a memory file that cannot shrink; the other
end opens it, finds the token in it, and answers OFFERED {taken}. Where that fails (another machine, container or user, or no Linux) all
frames go by the socket, as do those that are short and those for which there is no room: nobody ever waits for memory.

A frame lies in the sender's half as it would travel, and is announced by LENT {at, size, slot, turn}, in its place among the other
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
HALF = 4 << 20
#: Shorter frames go by the socket: two system calls cost as much as the copies.
LEAST = 32 << 10
SLOTS = 32
_TOKEN = 32
#: In front of the halves: the token, then how often each slot of either half was given back.
_FRONT = 4096
_COUNTS = 64


class _Loan(NamedTuple):
    """A frame that the other end may still look at."""

    at: int
    end: int
    slot: int
    turn: int


class Shared:
    """One connection's memory, as one of its ends has it: `first` for the end that made it."""

    def __init__(self, area: mmap.mmap, *, first: bool) -> None:
        whole, counts = memoryview(area), memoryview(area)[_COUNTS:_FRONT].cast("Q")
        halves = whole[_FRONT : _FRONT + HALF], whole[_FRONT + HALF :]
        returned = counts[:SLOTS], counts[SLOTS : 2 * SLOTS]
        self._mine, self._theirs = halves if first else halves[::-1]
        self._returned, self._returns = returned if first else returned[::-1]
        self._loans: list[_Loan] = []
        self._turns = [0] * SLOTS
        self._borrowed: dict[int, weakref.ref[np.ndarray]] = {}
        self._seen = [0] * SLOTS
        self._process = os.getpid()

    def lend(self, buffers: Sequence[wire.Buffer]) -> list[wire.Buffer] | None:
        """Put a frame where the other end sees it: what to send instead. None: it is short, or there is no room for it now."""
        size = wire.size_of(buffers)
        if not LEAST <= size <= HALF:
            return None
        returned = self._returned
        self._loans = loans = [loan for loan in self._loans if returned[loan.slot] != loan.turn]
        if len(loans) == SLOTS:
            return None
        at = place = 0
        for loan in loans:  # in the order in which they lie
            if loan.at - at >= size:
                break
            at, place = -(-loan.end // wire.ALIGN) * wire.ALIGN, place + 1
        if at + size > HALF:
            return None
        taken = {loan.slot for loan in loans}
        slot = next(slot for slot in range(SLOTS) if slot not in taken)
        self._turns[slot] += 1
        loan = _Loan(at, at + size, slot, self._turns[slot])
        loans.insert(place, loan)
        for buffer in buffers:
            self._mine[at : at + len(buffer)] = buffer
            at += len(buffer)
        return wire.encode(wire.LENT, 0, {"at": loan.at, "size": size, "slot": slot, "turn": loan.turn})

    def borrow(self, meta: dict[str, Any]) -> wire.Frame:
        """The frame that the other end announced; its slot is given back when the last view of it is gone."""
        at, size, slot, turn = (meta.get(name) for name in ("at", "size", "slot", "turn"))
        if not (type(at) is type(size) is type(slot) is type(turn) is int):
            raise wire.WireError("LENT: at, size, slot and turn are numbers")
        if not (0 <= at < at + size <= HALF and 0 <= slot < SLOTS and 0 < turn < 1 << 62) or at % wire.ALIGN:
            raise wire.WireError(f"LENT: {size} bytes at {at} in slot {slot} are not in the memory that is shared")
        if turn <= self._seen[slot]:
            raise wire.WireError(f"LENT: turn {turn} of slot {slot} after {self._seen[slot]}")
        self._seen[slot] = turn
        raw = np.frombuffer(self._theirs, np.uint8, size, at)
        returns, process = self._returns, self._process

        def give_back(_: object) -> None:
            if os.getpid() == process:  # a forked child's views are not ours, and the memory is the parent's
                returns[slot] = turn

        self._borrowed[slot] = weakref.ref(raw, give_back)
        return wire.parse(raw)


class Offer:
    """Memory that was offered and not answered yet."""

    def __init__(self, handle: int, area: mmap.mmap, token: bytes) -> None:
        self._handle, self.area, self._token = handle, area, token

    @property
    def frame(self) -> list[wire.Buffer]:
        """What to say to the other end."""
        return wire.encode(wire.OFFER, 0, {"pid": os.getpid(), "handle": self._handle, "token": self._token.hex()})

    def answered(self, meta: dict[str, Any]) -> Shared | None:
        """The other end's word: what both have, if it took it."""
        self.close()
        return Shared(self.area, first=True) if meta.get("taken") is True else None

    def close(self) -> None:
        """No longer to be had by others."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def offer(connection: socket.socket) -> Offer | None:
    """Memory to share over this connection; None where it leads to another machine, or this one cannot."""
    if not hasattr(os, "memfd_create"):
        return None
    handle = -1
    try:
        if connection.getpeername()[0] != connection.getsockname()[0]:
            return None
        handle = os.memfd_create("echelon", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(handle, _FRONT + 2 * HALF)
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        area = mmap.mmap(handle, _FRONT + 2 * HALF)
    except OSError:
        if handle >= 0:
            os.close(handle)
        return None
    token = secrets.token_bytes(_TOKEN)
    area[:_TOKEN] = token
    return Offer(handle, area, token)


def take(meta: dict[str, Any]) -> Shared | None:
    """Memory that a caller offered; None where it cannot be had from here, or is not what was offered."""
    pid, number, token = meta.get("pid"), meta.get("handle"), meta.get("token")
    if type(pid) is not int or type(number) is not int or type(token) is not str:
        raise wire.WireError("OFFER: pid, handle and token are expected")
    path, size, handle = f"/proc/{pid}/fd/{number}", _FRONT + 2 * HALF, -1
    try:
        known = os.stat(path)
        if not stat.S_ISREG(known.st_mode) or known.st_size != size:
            return None
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        # A file that could shrink would end us with a signal when we read what is gone.
        if os.fstat(handle).st_size != size or not fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return None
        area = mmap.mmap(handle, size)
        # The number of a process may be another's where we are.
        return Shared(area, first=False) if secrets.compare_digest(area[:_TOKEN].hex(), token) else None
    except (OSError, OverflowError, TypeError, ValueError):
        return None
    finally:
        if handle >= 0:
            os.close(handle)
