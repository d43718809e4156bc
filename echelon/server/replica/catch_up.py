"""As head: bringing other replicas to where we are (who is how far, snapshots, learners that catch up), and handing shards over."""

from __future__ import annotations

import numpy as np

from echelon.server.protocol import wire
from echelon.server.protocol.actions import LINK, Close
from echelon.server.replica.pushes import PushHandler
from echelon.server.replica.replica_link import ReplicaLink, SnapshotTransfer
from echelon.server.replica.shard_state import ReplicaDiverged

#: A drained shard whose new head does not come (the controller died) is served again after this.
DRAIN_TIMEOUT = 1.0


class ReplicaCatchUp(PushHandler):
    """A head's links."""

    def _handle_link_frame(self, now: float, link: ReplicaLink, frame: wire.Frame) -> None:
        meta, kind = frame.meta, frame.kind
        if kind == wire.MAP_REQUEST:
            if meta["version"] < self.map.version:
                self._send_to_replica(
                    link.server, wire.MAP_UPDATE, {"map": self.map.to_document(), "specs": self.specs}
                )
            return
        if kind == wire.REFUSED:
            self._queued_actions.append(Close(LINK, link.server))
            return
        is_current = meta["v"] <= self.map.version
        link.peer_map_version = max(link.peer_map_version, meta["v"])
        if not is_current and self._requested_map_version < meta["v"]:
            self._requested_map_version = meta["v"]
            self._send_to_replica(link.server, wire.MAP_REQUEST, {"version": self.map.version})
        if kind == wire.HELLO_REPLY:
            if meta.get("refused"):
                link.has_refused[meta["refused"]] = True
            # Not up before that: what follows from it is numbered behind what is sent again, and goes out behind it.
            self._on_acked(now, link, meta["last"], is_current)
            link.is_up, link.down_since = True, float("inf")
            for message in link.unacked:
                self._send_to_replica(link.server, message.kind, message.meta, message.arrays)
            self._request_log_state(link)
        elif kind == wire.REPLICA_ACK:
            if meta.get("refused"):
                link.has_refused[meta["refused"]] = True
            self._on_acked(now, link, meta["n"], is_current)
        elif kind == wire.LOG_STATE_REPLY:
            self._on_log_state_reply(now, link, frame)
        elif kind == wire.HEARTBEAT:
            while link.unanswered_heartbeats and link.unanswered_heartbeats[0][0] <= meta["n"]:
                _, sent_at = link.unanswered_heartbeats.popleft()
                if is_current:
                    link.lease_start = max(link.lease_start, sent_at)
            if self._waiting_reads:
                self._retry_waiting(now)
        self._start_transfer(now, link)

    def _on_acked(self, now: float, link: ReplicaLink, number: int, is_current: bool) -> None:
        """Everything up to a number is there."""
        if number > link.last_number:
            raise ReplicaDiverged(f"{link.server} has message {number} of {link.last_number}")
        link.last_acked = max(link.last_acked, number)
        while link.unacked and link.unacked[0].number <= number:
            message = link.unacked.popleft()
            if is_current:
                link.lease_start = max(link.lease_start, message.sent_at)
        while link.pending_acks and link.pending_acks[0][0] <= number:
            _, ack = link.pending_acks.popleft()
            if ack.awaited_numbers.pop(link.server, None) is not None and not ack.awaited_numbers:
                self._send_ack(ack)
        if link.transfer is not None:
            self._on_parts_acked(now, link, link.transfer, number)
        for shard, last_number in [entry for entry in link.catching_up if entry[1] <= number]:
            link.catching_up.remove((shard, last_number))
            if not link.has_refused[shard]:
                self._report_caught_up(link, shard)
        if self._handovers:
            self._report_drained()

    def _request_log_state(self, link: ReplicaLink) -> None:
        """Ask how far the replica is with shards of which we do not know it."""
        is_unknown = (
            (link.is_backup | link.is_learner) & ~link.is_forwarding & ~link.log_state_requested & ~self._is_unloaded
        )
        is_unknown[list(link.snapshot_queue)] = False
        if link.transfer is not None:
            is_unknown[link.transfer.shard] = False
        shards = np.flatnonzero(is_unknown)
        if link.is_up and len(shards):
            link.log_state_requested[shards] = True
            self._send_to_replica(
                link.server, wire.LOG_STATE, {"v": self.map.version, "of": self.map.version}, [shards.astype(np.uint16)]
            )

    def _on_log_state_reply(self, now: float, link: ReplicaLink, frame: wire.Frame) -> None:
        shards, entry_versions, lsns = frame.arrays
        if frame.meta["of"] != self.map.version:
            return  # asked again since
        for shard, entry_version, lsn in zip(shards.tolist(), entry_versions.tolist(), lsns.tolist(), strict=True):
            if not link.log_state_requested[shard]:
                continue
            link.log_state_requested[shard] = link.has_refused[shard] = False
            if lsn == self.state.lsn[shard] and entry_version == self.state.entry_version[shard]:
                link.is_forwarding[shard] = True
                self._mark_synced(now, link, shard)
            elif link.is_backup[shard]:
                link.snapshot_queue.appendleft(shard)
            else:
                link.snapshot_queue.append(shard)
        self._update_ready()
        self._add_workers(now)
        self._commit_steps(now)
        self._retry_waiting(now)

    def _mark_synced(self, now: float, link: ReplicaLink, shard: int) -> None:
        """A replica has what we have of a shard, but for entries under way."""
        link.is_synced[shard] = True
        if link.is_learner[shard]:
            # From here on nothing is acknowledged without it; once it has what was sent before, it lacks nothing.
            link.is_required[shard] = True
            link.catching_up.append((shard, link.last_number))
            if link.last_acked >= link.last_number:
                self._on_acked(now, link, link.last_acked, False)
        else:
            self._update_ready()
            self._retry_blocked_acks()
            self._add_workers(now)
            self._commit_steps(now)
            self._retry_waiting(now)

    def _start_transfer(self, now: float, link: ReplicaLink) -> None:
        """Begin the next snapshot, if one is due and none is under way. Those of backups are due at once: pushes wait for them."""
        if (
            link.is_up
            and link.snapshot_queue
            and link.transfer is None
            and (now >= link.next_transfer_at or link.is_backup[link.snapshot_queue[0]])
        ):
            shard = link.snapshot_queue.popleft()
            link.transfer = SnapshotTransfer(shard, self.state.snapshot(shard))
            link.transfer_started = now
            self._send_parts(now, link, link.transfer)

    def _send_parts(self, now: float, link: ReplicaLink, transfer: SnapshotTransfer) -> None:
        """Send the next parts of a snapshot; behind the last one what was pushed meanwhile."""
        while transfer.parts and len(transfer.unacked_parts) < self.max_parts_in_flight:
            index, meta, arrays = transfer.parts.popleft()
            part_meta = {
                "v": self.map.version,
                "shard": transfer.shard,
                "part": index,
                "parts": transfer.part_count,
                "meta": meta,
            }
            transfer.unacked_parts.append(self._send_numbered(now, link, wire.SNAPSHOT, part_meta, arrays))
        if not transfer.parts and transfer.last_part_number is None:
            transfer.last_part_number = transfer.unacked_parts[-1]
            link.is_forwarding[transfer.shard] = True
            for meta, arrays in transfer.deferred_entries:
                self._send_numbered(now, link, wire.LOG_ENTRY, meta, arrays)
            transfer.deferred_entries = []

    def _on_parts_acked(self, now: float, link: ReplicaLink, transfer: SnapshotTransfer, number: int) -> None:
        """Everything up to a number is there."""
        while transfer.unacked_parts and transfer.unacked_parts[0] <= number:
            transfer.unacked_parts.popleft()
        self._send_parts(now, link, transfer)
        if transfer.last_part_number is None or transfer.last_part_number > number:
            return
        link.transfer = None
        # As long a pause as the snapshot took: others use the link too.
        link.next_transfer_at = now + min(now - link.transfer_started, 1.0)
        if not link.has_refused[transfer.shard]:
            self._mark_synced(now, link, transfer.shard)

    def _report_caught_up(self, link: ReplicaLink, shard: int) -> None:
        self._send_to_controller(
            wire.CAUGHT_UP,
            {"shard": shard, "learner": link.server, "incarnation": link.incarnation, "version": self.map.version},
        )
        if self._handovers:
            self._report_drained()

    def _begin_handover(self, now: float, shards: np.ndarray) -> None:
        """Take no more pushes for these shards, and tell the controller when everything on them is answered."""
        self.is_draining[shards] = True
        self._update_ready()
        self._handovers.append((now + DRAIN_TIMEOUT, shards, False))
        self._report_drained()

    def _report_drained(self) -> None:
        """Tell the controller of shards on which everything is answered."""
        for index, (deadline, shards, is_reported) in enumerate(self._handovers):
            if is_reported or not len(shards):
                continue
            if all(
                link.last_acked == link.last_number or not link.must_ack(self.shard_sets.from_numbers(shards))
                for link in self.links.values()
            ):
                self._handovers[index] = (deadline, shards, True)
                self._send_to_controller(wire.DRAINED, {"shards": shards.tolist(), "version": self.map.version})
