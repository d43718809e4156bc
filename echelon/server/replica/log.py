"""As head: entries of a shard's log on their way to the other replicas, and who waits until all of them have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from echelon.server.protocol import wire
from echelon.server.protocol.shard_sets import ShardSet, all_set, any_set
from echelon.server.replica.replica_link import PendingAck, ReplicaLink, SnapshotTransfer, UnackedMessage
from echelon.server.replica.state import ReplicaState


class ReplicationLog(ReplicaState):
    """The log."""

    def _forward(
        self, now: float, frame: wire.Frame, applied_shards: ShardSet, *, covers_all_shards: bool, is_noop: bool = False
    ) -> None:
        for link in self.links.values():
            if link.transfer is not None and link.transfer.last_part_number is None:
                self._defer_entry(link.transfer, frame, applied_shards, is_noop)
            is_forwarding = link.is_forwarding[applied_shards.index]
            forwards_all = all_set(is_forwarding)
            if not forwards_all and not any_set(is_forwarding):
                continue
            meta: dict[str, Any] = {"v": self.map.version}
            if is_noop:
                meta["void"] = True
            if not covers_all_shards or not forwards_all:
                meta["only"] = applied_shards.wire_shards[is_forwarding].tolist()
            self._send_numbered(now, link, wire.LOG_ENTRY, meta, [frame.raw])

    def _defer_entry(
        self, transfer: SnapshotTransfer, frame: wire.Frame, applied_shards: ShardSet, is_noop: bool
    ) -> None:
        """An entry of a shard of which a replica does not have the whole snapshot yet."""
        if (applied_shards.shards == transfer.shard).any():
            meta: dict[str, Any] = {"v": self.map.version, "only": [transfer.shard]}
            if is_noop:
                meta["void"] = True
            transfer.deferred_entries.append((meta, [frame.raw]))

    def _send_numbered(
        self, now: float, link: ReplicaLink, kind: int, meta: dict[str, Any], arrays: Sequence[np.ndarray]
    ) -> int:
        link.last_number += 1
        meta["n"] = link.last_number
        link.unacked.append(UnackedMessage(link.last_number, kind, meta, arrays, now))
        if link.is_up:
            self._send_to_replica(link.server, kind, meta, arrays)
        return link.last_number

    def _ack_when_replicated(self, ack: PendingAck) -> None:
        """Answer a worker when all that it takes is there."""
        for link in self.links.values():
            if link.last_acked < link.last_number and link.must_ack(ack.shard_set):
                ack.awaited_numbers[link.server] = link.last_number
                link.pending_acks.append((link.last_number, ack))
        if not ack.awaited_numbers:
            self._send_ack(ack)

    def _send_ack(self, ack: PendingAck) -> None:
        version, shard_set = self.map.version, ack.shard_set
        for link in self.links.values():
            if link.is_behind(shard_set) or (link.peer_map_version > version and link.must_ack(shard_set)):
                self._blocked_acks.append(ack)
                return
        if ack.peer is not None:
            kind, meta = ack.answer
            self._send_to_peer(ack.peer, kind, ack.request_id, meta)

    def _retry_blocked_acks(self) -> None:
        blocked, self._blocked_acks = self._blocked_acks, []
        for ack in blocked:
            if not ack.awaited_numbers:
                self._send_ack(ack)

    def _append_entry(self, now: float, kind: int, meta: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
        """An entry of the head's own."""
        frame = wire.parse(wire.join_buffers(wire.encode(kind, 0, meta, arrays)))
        shard_set = self.shard_sets.get(frame.arrays[0])
        self._apply_entry(frame, shard_set, self.map.version)
        self._forward(now, frame, shard_set, covers_all_shards=True)

    def _apply_entry(self, frame: wire.Frame, shard_set: ShardSet, version: int) -> None:
        if frame.kind == wire.COMMIT_STEP:
            self.state.commit_step(frame, shard_set, version=version)
        elif frame.kind == wire.ADD_WORKER:
            self.state.add_worker(frame, shard_set, version=version)
            self._min_clock = None
        elif frame.kind == wire.EXPIRE:
            self.state.expire_rows(frame, shard_set, version=version)
        elif frame.kind == wire.FORGET_WORKERS:
            self.state.forget_workers(frame, shard_set, version=version)
        else:
            raise wire.WireError(f"an entry of kind {wire.KIND_NAMES.get(frame.kind, frame.kind)}")
