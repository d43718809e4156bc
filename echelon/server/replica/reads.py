"""As head: pulls, and other questions that change nothing; when they may be answered, and when they wait."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from echelon.errors import EchelonError, ServerError
from echelon.server.protocol import wire
from echelon.server.protocol.actions import PEER, Close, Note
from echelon.server.protocol.shard_sets import Cover, every, some
from echelon.server.replica.clocks import Clocks
from echelon.server.replica.dedup import ABSENT, FAR
from echelon.server.replica.state import MALFORMED

#: A lonely head that has not heard of the controller for so long waits; well below the grace after which its shards go to others.
DOUBT = 1.0


class Reads(Clocks):
    """Answers to workers that read."""

    def _doubtful(self, now: float, cover: Cover) -> bool:
        """Whether shards that should have replicas, and have none who would refuse us, may be another's by now.

        A chain of one that lost its backups goes back to a checkpoint some time after the controller lost sight of it; it must not
        acknowledge anything after that. While the controller is heard, it did not.
        """
        return self.wished > 1 and now - self.confirmed > DOUBT and some(self._single[cover.at])

    def _leased(self, now: float, cover: Cover) -> bool:
        for link in self.links.values():
            if now - link.heard >= self.lease and link.needed(cover):
                return False
        return now >= self._reads_all_from or not (self._reads_from[cover.at] > now).any()

    def _pull(self, now: float, peer: Hashable, frame: wire.Frame, cover: Cover) -> bool:
        """Answer a read; False: it must wait."""
        meta = frame.meta
        if not every(self.headed[cover.at]):
            if frame.kind == wire.DIGEST and every(self.map.held_by(self.name)[cover.at]):
                self._digest(peer, frame)
                return True
            if meta["version"] > self.map.version:
                return False
            self._stale(peer, frame)
            return True
        if (
            not self._leased(now, cover)
            or self._doubtful(now, cover)
            or (self.loading and some(self._unloaded[cover.at]))
        ):
            return False
        try:
            return self._read(peer, frame, cover)
        except EchelonError as error:
            self._refuse(peer, frame, type(error).__name__, str(error))
        except MALFORMED as error:
            self._out += [Note("garbage", {"why": f"{frame}: {error}"}), Close(PEER, peer)]
        return True

    def _read(self, peer: Hashable, frame: wire.Frame, cover: Cover) -> bool:
        meta, arrays = frame.meta, frame.arrays
        if frame.kind == wire.PULL:
            if meta["bound"] is not None and not self._near(meta["step"], meta["bound"], cover):
                return False
            self._rows(peer, frame)
        elif frame.kind == wire.CHANGED:
            store, name = self.state.store, meta["table"]
            if arrays[1].shape != arrays[0].shape or arrays[1].dtype != np.int64:
                raise wire.WireError("CHANGED: one log number per shard is expected")
            ids, until = store.changed_until(name, cover.shards, arrays[1], meta["limit"])
            rows = store.read(name, ids, meta["wire"])
            self._send(peer, wire.ROWS, frame.request, {"counts": [1, len(rows), 1]}, [ids, *rows, until])
        elif frame.kind == wire.CLOCK:
            slot = self.state.windows.slots.get((meta["worker"], meta["incarnation"]))
            windows = self.state.windows
            if slot is None or ((windows.clock[slot] == ABSENT) & ~windows.restored)[cover.at].any():
                return False
            floor = self.floor()[cover.at]
            floor = floor[floor != FAR]
            furthest = max(int(windows.furthest(cover.shards).max()), 0)
            # Where all came out of a checkpoint nobody counts before its first push: it goes on where the furthest was.
            least = int(floor.min()) if len(floor) else furthest
            most = max((int(windows.clock[live][cover.at].max()) for live in self._live), default=0)
            pending = any(
                np.isin(held.shards, cover.shards).any() for waiting in self.state.pending.values() for held in waiting
            )
            # `furthest`: of those that left too; `pending`: whether gradients wait for a step's end.
            told = {"min": least, "max": max(most, least), "furthest": furthest, "pending": pending}
            self._send(peer, wire.CLOCKED, frame.request, told)
        else:
            self._digest(peer, frame)
        return True

    def _near(self, step: int, bound: int, cover: Cover) -> bool:
        """Whether all workers are near enough to this step for a read of it, and what they ended before it is applied."""
        if some(self.floor()[cover.at] < step - bound):
            return False
        return not any(
            earlier < step and any(np.isin(held.shards, cover.shards).any() for held in waiting)
            for earlier, waiting in self.state.pending.items()
        )

    def _rows(self, peer: Hashable, frame: wire.Frame) -> None:
        store, counts, size = self.state.store, [], 0
        found: list[np.ndarray | wire.Pieces] = []
        for op, ids in zip(frame.meta["ops"], frame.arrays[1:], strict=True):
            part: Sequence[np.ndarray | wire.Pieces]
            if "table" in op:
                part = store.read(op["table"], ids, op["wire"])
            else:
                blocks = store.read_blocks(op["dense"], ids)
                part = [wire.Pieces(blocks)] if blocks else []
            for each in part:
                size += each.nbytes
            self.counts["rows"] += len(ids)
            found += part
            counts.append(len(part))
        if size > wire.MAX_FRAME - wire.MAX_META:
            raise ServerError(f"an answer of more than {wire.MAX_FRAME >> 20} MiB; ask for fewer rows at once")
        self.counts["pulls"] += 1
        self._send(peer, wire.ROWS, frame.request, {"counts": counts}, found)

    def _digest(self, peer: Hashable, frame: wire.Frame) -> None:
        digests = [np.frombuffer(self.state.digest(int(shard)), np.uint8) for shard in frame.arrays[0]]
        self._send(
            peer,
            wire.DIGESTS,
            frame.request,
            {"version": self.map.version},
            [np.stack(digests), self.state.lsn[frame.arrays[0]]],
        )
