"""A head's side of the connection to one other replica: what was sent and not answered, and which shards are equal there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from echelon.server.protocol.shard_sets import ShardSet, all_set, any_set


class UnackedMessage(NamedTuple):
    """A numbered message that is kept until it is answered."""

    number: int
    kind: int
    meta: dict[str, Any]
    arrays: Sequence[np.ndarray]
    sent_at: float


class PendingAck:
    """A worker's frame that is answered once all replicas have it."""

    __slots__ = ("answer", "awaited_numbers", "peer", "request_id", "shard_set")

    def __init__(self, peer: Any, request_id: int, shard_set: ShardSet, answer: tuple[int, dict[str, Any]]) -> None:
        self.peer, self.request_id, self.shard_set, self.answer = peer, request_id, shard_set, answer
        #: Per replica the number of the message that it has yet to answer.
        self.awaited_numbers: dict[str, int] = {}


class SnapshotTransfer:
    """A shard's snapshot on its way to a replica: some parts at a time, so that entries of other shards get between them."""

    __slots__ = ("deferred_entries", "last_part_number", "part_count", "parts", "shard", "unacked_parts")

    def __init__(self, shard: int, parts: Sequence[tuple[dict[str, Any], Sequence[np.ndarray]]]) -> None:
        self.shard, self.part_count = shard, len(parts)
        #: Place, what it says, arrays of parts that are yet to be sent.
        self.parts = deque((index, meta, arrays) for index, (meta, arrays) in enumerate(parts))
        self.unacked_parts: deque[int] = deque()
        #: Entries of the shard since the snapshot was taken: they follow its last part.
        self.deferred_entries: list[tuple[dict[str, Any], Sequence[np.ndarray]]] = []
        #: Of the last part; None while some are yet to be sent.
        self.last_part_number: int | None = None


class ReplicaLink:
    """To one replica, in one of its lives. Arrays are per shard."""

    def __init__(self, server: str, incarnation: int, num_shards: int, link_id: int) -> None:
        self.server, self.incarnation = server, incarnation
        #: Tells this link from earlier ones to the same replica: messages are numbered from 1 in each.
        self.link_id = link_id
        self.is_up = False
        self.down_since = float("inf")
        #: The newest map that the replica is known to have. While ours is older, nothing is acknowledged by its answers.
        self.peer_map_version = 0
        #: The number of the last message made, and of the last one answered.
        self.last_number = 0
        self.last_acked = 0
        self.unacked: deque[UnackedMessage] = deque()
        self.pending_acks: deque[tuple[int, PendingAck]] = deque()
        #: When the newest message that it has answered was sent: what reads are leased by.
        self.lease_start = float("-inf")
        self.last_heartbeat = float("-inf")
        self.unanswered_heartbeats: deque[tuple[int, float]] = deque()
        self.is_backup = np.zeros(num_shards, bool)
        self.is_learner = np.zeros(num_shards, bool)
        #: Equal there, up to messages under way; entries are sent for `is_forwarding` ones (those whose snapshot is under way too).
        self.is_synced = np.zeros(num_shards, bool)
        self.is_forwarding = np.zeros(num_shards, bool)
        #: Asked how far it is, and no answer yet.
        self.log_state_requested = np.zeros(num_shards, bool)
        #: Learners without whose answer nothing is acknowledged any more.
        self.is_required = np.zeros(num_shards, bool)
        #: It knows a newer map and did not take an entry.
        self.has_refused = np.zeros(num_shards, bool)
        self.snapshot_queue: deque[int] = deque()
        #: The snapshot that is under way.
        self.transfer: SnapshotTransfer | None = None
        self.next_transfer_at = float("-inf")
        self.transfer_started = 0.0
        #: (shard, number): once that is answered, the learner has everything that was ever acknowledged.
        self.catching_up: list[tuple[int, int]] = []

    def must_ack(self, shard_set: ShardSet) -> bool:
        """Whether an acknowledgement on some of these shards needs its answer."""
        return any_set(self.is_backup[shard_set.index]) or any_set(self.is_required[shard_set.index])

    def is_behind(self, shard_set: ShardSet) -> bool:
        """Whether something is missing there of shards that need its answer."""
        index = shard_set.index
        if all_set(self.is_synced[index]) and not any_set(self.has_refused[index]):
            return False
        return bool(
            (
                (self.is_backup[index] | self.is_required[index]) & (~self.is_synced[index] | self.has_refused[index])
            ).any()
        )

    def reset_shards(self, shards: np.ndarray) -> None:
        """Nothing is known any more of how these shards are there."""
        for flags in (self.is_synced, self.is_forwarding, self.log_state_requested, self.is_required, self.has_refused):
            flags[shards] = False
        self.snapshot_queue = deque(shard for shard in self.snapshot_queue if not shards[shard])
        self.catching_up = [(shard, number) for shard, number in self.catching_up if not shards[shard]]
        if self.transfer is not None and shards[self.transfer.shard]:
            self.transfer = None

    def on_disconnect(self) -> None:
        """The connection is gone; what was asked for is asked again, what was sent is sent again."""
        self.is_up = False
        self.log_state_requested[:] = False
        self.unanswered_heartbeats.clear()
