"""A head's link to one other replica: what was sent and not acknowledged, and which shards are equal there."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from echelon.server.protocol import wire
from echelon.server.protocol.actions import Send
from echelon.server.protocol.shard_sets import ShardSet, all_set, any_set
from echelon.server.store import SnapshotPart

Meta = dict[str, Any]
Arrays = Sequence[np.ndarray | wire.ChunkedArray]


@dataclass(slots=True, eq=False)
class PendingAck:
    """The answer to a worker's frame, sent once all replicas have the frame."""

    peer: Hashable
    request_id: int
    shard_set: ShardSet
    answer: tuple[int, dict[str, Any]]
    #: Per replica, the number of the message that it has yet to acknowledge.
    awaited_numbers: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class SnapshotTransfer:
    """A shard's snapshot on its way to a replica: a few parts at a time, so that entries of other shards get between them."""

    shard: int
    parts: Sequence[SnapshotPart]
    started_at: float
    parts_sent: int = 0
    unacked_parts: deque[int] = field(default_factory=deque)  # message numbers of the parts in flight
    #: Entries of the shard since the snapshot was taken: they follow its last part.
    deferred_entries: list[SnapshotPart] = field(default_factory=list)
    last_part_number: int | None = None  # message number of the last part; None while parts are left to send


class ReplicaLink:
    """The link to one incarnation of a replica. Arrays are per shard."""

    def __init__(self, server: str, incarnation: int, num_shards: int, link_id: int) -> None:
        self.server, self.incarnation = server, incarnation
        #: Distinguishes this link from earlier ones to the same replica: each numbers its messages from 1.
        self.link_id = link_id
        self.is_up, self.down_since = False, float("inf")
        #: The newest map that the replica is known to have. While ours is older, its answers acknowledge nothing.
        self.peer_map_version = 0
        self.last_number = self.last_acked = 0  # numbers of the last message created and of the last one acknowledged
        #: Messages to send again on the next connection, with their numbers and when they were sent.
        self.unacked: deque[tuple[int, float, Send]] = deque()
        self.pending_acks: deque[tuple[int, PendingAck]] = deque()
        #: When the newest acknowledged message was sent: the start of the lease for reads.
        self.lease_start = self.last_heartbeat = float("-inf")
        self.unanswered_heartbeats: deque[tuple[int, float]] = deque()
        #: The replica's role. A learner that `is_required` must acknowledge like a backup.
        self.is_backup, self.is_learner, self.is_required = (np.zeros(num_shards, bool) for _ in range(3))
        #: Equal there except for messages in flight; entries are sent for `is_forwarding` shards, which include one whose snapshot is in flight.
        self.is_synced, self.is_forwarding = np.zeros(num_shards, bool), np.zeros(num_shards, bool)
        self.log_state_requested = np.zeros(num_shards, bool)
        self.has_refused = np.zeros(num_shards, bool)  # the replica knows a newer map and did not take an entry
        self.snapshot_queue: deque[int] = deque()
        self.transfer: SnapshotTransfer | None = None
        self.next_transfer_at = float("-inf")
        #: (shard, number): once that number is acknowledged, the learner has everything that was ever acknowledged.
        self.catching_up: list[tuple[int, int]] = []

    def is_needed(self) -> bool:
        """Whether this replica's acknowledgement is required for any shard."""
        return bool((self.is_backup | self.is_required).any())

    def must_ack(self, shard_set: ShardSet) -> bool:
        """Whether this replica's acknowledgement is required for some of these shards."""
        return any_set(self.is_backup[shard_set.index]) or any_set(self.is_required[shard_set.index])

    def is_behind(self, shard_set: ShardSet) -> bool:
        """Whether it lacks something of a shard for which its acknowledgement is required."""
        index = shard_set.index
        if all_set(self.is_synced[index]) and not any_set(self.has_refused[index]):
            return False
        is_required = self.is_backup[index] | self.is_required[index]
        return bool((is_required & (~self.is_synced[index] | self.has_refused[index])).any())

    def reset_shards(self, shards: np.ndarray) -> None:
        """Forget what the replica has of these shards."""
        for flags in (self.is_synced, self.is_forwarding, self.log_state_requested, self.is_required, self.has_refused):
            flags[shards] = False
        self.snapshot_queue = deque(shard for shard in self.snapshot_queue if not shards[shard])
        self.catching_up = [(shard, number) for shard, number in self.catching_up if not shards[shard]]
        if self.transfer is not None and shards[self.transfer.shard]:
            self.transfer = None

    def on_disconnect(self, now: float) -> None:
        """The connection is gone: requests are repeated and messages sent again on the next one."""
        self.is_up, self.down_since = False, min(now, self.down_since)
        self.log_state_requested[:] = False
        self.unanswered_heartbeats.clear()
