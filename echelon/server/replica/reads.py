"""As head: pulls, and other questions that change nothing; when they may be answered, and when they wait."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from echelon.errors import EchelonError, ServerError
from echelon.server.protocol import wire
from echelon.server.protocol.actions import PEER, Close, LogEvent
from echelon.server.protocol.shard_sets import ShardSet, all_set, any_set
from echelon.server.replica.clocks import WorkerClocks
from echelon.server.replica.dedup import INFINITE_CLOCK, NOT_COUNTED
from echelon.server.replica.state import MALFORMED_ERRORS

#: A lonely head that has not heard of the controller for so long waits; well below the grace after which its shards go to others.
CONTROLLER_SILENCE_LIMIT = 1.0


class ReadHandler(WorkerClocks):
    """Answers to workers that read."""

    def _may_be_superseded(self, now: float, shard_set: ShardSet) -> bool:
        """Whether shards that should have replicas, and have none who would refuse us, may be another's by now.

        A chain of one that lost its backups goes back to a checkpoint some time after the controller lost sight of it; it must not
        acknowledge anything after that. While the controller is heard, it did not.
        """
        return (
            self.target_replicas > 1
            and now - self.controller_heard_at > CONTROLLER_SILENCE_LIMIT
            and any_set(self._is_sole_replica[shard_set.index])
        )

    def _holds_lease(self, now: float, shard_set: ShardSet) -> bool:
        for link in self.links.values():
            if now - link.lease_start >= self.lease and link.must_ack(shard_set):
                return False
        return now >= self._all_reads_allowed_from or not (self._reads_allowed_from[shard_set.index] > now).any()

    def _try_read(self, now: float, peer: Hashable, frame: wire.Frame, shard_set: ShardSet) -> bool:
        """Answer a read; False: it must wait."""
        meta = frame.meta
        if not all_set(self.is_head[shard_set.index]):
            if frame.kind == wire.DIGEST and all_set(self.map.replica_mask(self.name)[shard_set.index]):
                self._send_digests(peer, frame)
                return True
            if meta["version"] > self.map.version:
                return False
            self._send_stale(peer, frame)
            return True
        if (
            not self._holds_lease(now, shard_set)
            or self._may_be_superseded(now, shard_set)
            or (self.shards_to_load and any_set(self._is_unloaded[shard_set.index]))
        ):
            return False
        try:
            return self._answer_read(peer, frame, shard_set)
        except EchelonError as error:
            self._refuse(peer, frame, type(error).__name__, str(error))
        except MALFORMED_ERRORS as error:
            self._queued_actions += [LogEvent("garbage", {"why": f"{frame}: {error}"}), Close(PEER, peer)]
        return True

    def _answer_read(self, peer: Hashable, frame: wire.Frame, shard_set: ShardSet) -> bool:
        meta, arrays = frame.meta, frame.arrays
        if frame.kind == wire.PULL:
            if meta["bound"] is not None and not self._is_within_staleness(meta["step"], meta["bound"], shard_set):
                return False
            self._send_rows(peer, frame)
        elif frame.kind == wire.CHANGED:
            store, name = self.state.store, meta["table"]
            if arrays[1].shape != arrays[0].shape or arrays[1].dtype != np.int64:
                raise wire.WireError("CHANGED: one log number per shard is expected")
            ids, until_lsn = store.changed_ids_until(name, shard_set.shards, arrays[1], meta["limit"])
            rows = store.read(name, ids, meta["wire"])
            self._send_to_peer(
                peer, wire.ROWS, frame.request_id, {"counts": [1, len(rows), 1]}, [ids, *rows, until_lsn]
            )
        elif frame.kind == wire.CLOCK:
            slot = self.state.dedup.slots.get((meta["worker"], meta["incarnation"]))
            dedup = self.state.dedup
            if slot is None or ((dedup.clocks[slot] == NOT_COUNTED) & ~dedup.is_rolled_back)[shard_set.index].any():
                return False
            min_clocks = self.min_clock()[shard_set.index]
            min_clocks = min_clocks[min_clocks != INFINITE_CLOCK]
            furthest = max(int(dedup.max_clock(shard_set.shards).max()), 0)
            # Where all came out of a checkpoint nobody counts before its first push: it goes on where the furthest was.
            slowest = int(min_clocks.min()) if len(min_clocks) else furthest
            fastest = max(
                (int(dedup.clocks[live_slot][shard_set.index].max()) for live_slot in self._live_slots), default=0
            )
            has_pending = any(
                np.isin(push.shards, shard_set.shards).any()
                for pushes in self.state.pending_pushes.values()
                for push in pushes
            )
            # `furthest`: of those that left too; `has_pending`: whether gradients wait for a step's end.
            clocks = {"min": slowest, "max": max(fastest, slowest), "furthest": furthest, "pending": has_pending}
            self._send_to_peer(peer, wire.CLOCK_REPLY, frame.request_id, clocks)
        else:
            self._send_digests(peer, frame)
        return True

    def _is_within_staleness(self, step: int, staleness: int, shard_set: ShardSet) -> bool:
        """Whether all workers are near enough to this step for a read of it, and what they ended before it is applied."""
        if any_set(self.min_clock()[shard_set.index] < step - staleness):
            return False
        return not any(
            pending_step < step and any(np.isin(push.shards, shard_set.shards).any() for push in pushes)
            for pending_step, pushes in self.state.pending_pushes.items()
        )

    def _send_rows(self, peer: Hashable, frame: wire.Frame) -> None:
        store, counts, byte_count = self.state.store, [], 0
        arrays: list[np.ndarray | wire.ChunkedArray] = []
        for op, ids in zip(frame.meta["ops"], frame.arrays[1:], strict=True):
            operation_arrays: Sequence[np.ndarray | wire.ChunkedArray]
            if "table" in op:
                operation_arrays = store.read(op["table"], ids, op["wire"])
            else:
                blocks = store.read_blocks(op["dense"], ids)
                operation_arrays = [wire.ChunkedArray(blocks)] if blocks else []
            for array in operation_arrays:
                byte_count += array.nbytes
            self.counters["rows"] += len(ids)
            arrays += operation_arrays
            counts.append(len(operation_arrays))
        if byte_count > wire.MAX_FRAME_BYTES - wire.MAX_META_BYTES:
            raise ServerError(f"an answer of more than {wire.MAX_FRAME_BYTES >> 20} MiB; ask for fewer rows at once")
        self.counters["pulls"] += 1
        self._send_to_peer(peer, wire.ROWS, frame.request_id, {"counts": counts}, arrays)

    def _send_digests(self, peer: Hashable, frame: wire.Frame) -> None:
        digests = [np.frombuffer(self.state.digest(int(shard)), np.uint8) for shard in frame.arrays[0]]
        self._send_to_peer(
            peer,
            wire.DIGEST_REPLY,
            frame.request_id,
            {"version": self.map.version},
            [np.stack(digests), self.state.lsn[frame.arrays[0]]],
        )
