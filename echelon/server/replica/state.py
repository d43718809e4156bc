"""What all rooms of a replica share: what it holds, and how it says something."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from echelon.server.protocol import wire
from echelon.server.protocol.actions import CONTROL, LINK, PEER, Action, Close, LogEvent, Send
from echelon.server.protocol.shard_map import ShardMap, empty_map
from echelon.server.protocol.shard_sets import ShardSet, ShardSetCache
from echelon.server.replica.replica_link import PendingAck, ReplicaLink
from echelon.server.replica.shard_state import ReplicaDiverged, ReplicaStore, ShardState, SnapshotPart

LEASE = 0.3
#: Parts of a snapshot that are sent and not answered, at once.
MAX_PARTS_IN_FLIGHT = 4
#: What a frame with other contents than its kind should have makes a handler raise.
MALFORMED_ERRORS = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, MemoryError)


class ReplicaState:
    """Fields, and the ways out."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        store: ReplicaStore,
        num_shards: int,
        lease: float = LEASE,
        load_shard: Callable[[str, int], Sequence[SnapshotPart]] | None = None,
        declare_spec: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.name, self.incarnation, self.lease = name, incarnation, lease
        self.state = ShardState(store, num_shards)
        self.shard_sets = ShardSetCache(num_shards)
        self.map: ShardMap = empty_map(num_shards)
        self.specs: list[dict[str, Any]] = []
        self._load_shard, self._declare_spec = load_shard, declare_spec
        self._queued_actions: list[Action] = []
        # As head.
        self.links: dict[str, ReplicaLink] = {}
        self.is_head = np.zeros(num_shards, bool)
        #: Shards that are yet to be read out of a checkpoint: folder, and the version that ordered it.
        self.shards_to_load: dict[int, tuple[str, int]] = {}
        self._is_unloaded = np.zeros(num_shards, bool)
        self.is_ready = np.zeros(num_shards, bool)
        self.is_draining = np.zeros(num_shards, bool)
        self._handovers: list[tuple[float, np.ndarray, bool]] = []
        self._links_created = 0
        self.max_parts_in_flight = MAX_PARTS_IN_FLIGHT
        self._log_state_requested_at = 0.0
        #: When reads may begin, and when the last of the shards is so far.
        self._reads_allowed_from = np.full(num_shards, -np.inf)
        self._all_reads_allowed_from = float("-inf")
        #: Replicas that the job wishes for; when the controller was last heard; shards that we alone have.
        self.target_replicas = 1
        self.controller_heard_at = 0.0
        self._is_sole_replica = np.zeros(num_shards, bool)
        self._blocked_acks: list[PendingAck] = []
        self._waiting_pushes: list[tuple[Hashable, wire.Frame, ShardSet]] = []
        self._waiting_reads: list[tuple[Hashable, wire.Frame, ShardSet]] = []
        #: Orders to expire rows, until all that we head is ready.
        self._waiting_expiries: list[wire.Frame] = []
        self._live_slots: list[int] = []
        self._min_clock: np.ndarray | None = None
        # As backup.
        self._head_of_peer: dict[Hashable, tuple[str, int]] = {}
        #: Of each head: the number of its link, and of the last message of that; and shards of which it was refused something.
        self._last_received: dict[tuple[str, int], tuple[int, int]] = {}
        self._refused_shards: dict[tuple[str, int], set[int]] = {}
        self._frames_awaiting_map: dict[Hashable, list[wire.Frame]] = {}
        self._incoming_snapshots: dict[int, list[SnapshotPart]] = {}
        self._last_answered: dict[str, float] = {}
        self._acceptance_cache: dict[tuple[str, int, ShardSet], np.ndarray] = {}
        self._epochs = np.zeros(num_shards, np.int64)
        self._requested_map_version = -1
        self.counters = {"pushes": 0, "pulls": 0, "entries": 0, "rows": 0, "refused": 0, "stale": 0}

    def _reject_malformed(self, peer: Hashable, frame: wire.Frame, error: Exception) -> None:
        if peer in self._head_of_peer:
            raise ReplicaDiverged(f"{frame} of {self._head_of_peer[peer]}: {type(error).__name__}: {error}") from error
        reason = f"{wire.KIND_NAMES.get(frame.kind, frame.kind)}: {type(error).__name__}: {error}"
        self._queued_actions += [LogEvent("garbage", {"why": reason}), Close(PEER, peer)]

    def _take_actions(self) -> list[Action]:
        actions, self._queued_actions = self._queued_actions, []
        return actions

    def _send_to_peer(
        self,
        peer: Hashable,
        kind: int,
        request_id: int,
        meta: dict[str, Any],
        arrays: Sequence[np.ndarray | wire.ChunkedArray] = (),
    ) -> None:
        self._queued_actions.append(Send(PEER, peer, kind, request_id, meta, arrays))

    def _send_to_replica(
        self, server: str, kind: int, meta: dict[str, Any], arrays: Sequence[np.ndarray | wire.ChunkedArray] = ()
    ) -> None:
        self._queued_actions.append(Send(LINK, server, kind, 0, meta, arrays))

    def _send_to_controller(self, kind: int, meta: dict[str, Any]) -> None:
        self._queued_actions.append(Send(CONTROL, None, kind, 0, meta))

    def _send_stale(self, peer: Hashable, frame: wire.Frame) -> None:
        self.counters["stale"] += 1
        self._send_to_peer(peer, wire.STALE_MAP, frame.request_id, {"version": self.map.version})

    def _refuse(self, peer: Hashable, frame: wire.Frame, error: str, message: str) -> None:
        self.counters["refused"] += 1
        self._send_to_peer(peer, wire.REFUSED, frame.request_id, {"error": error, "message": message})

    def _parse_shard_set(self, frame: wire.Frame) -> ShardSet:
        shard_set = self.shard_sets.get(frame.arrays[0])
        if type(frame.meta["version"]) is not int:
            raise wire.WireError(f"{wire.KIND_NAMES[frame.kind]}: version {frame.meta['version']!r} is no number")
        return shard_set

    def _update_ready(self) -> None:
        is_ready = self.is_head & ~self.is_draining & ~self._is_unloaded
        for link in self.links.values():
            is_ready &= ~link.is_backup | link.is_synced
        self.is_ready = is_ready
