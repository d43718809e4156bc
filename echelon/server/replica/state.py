"""The state of a replica, and the ways in which its handlers answer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from echelon.server.protocol import wire
from echelon.server.protocol.actions import CONTROL, LINK, PEER, Action, Close, LogEvent, Send
from echelon.server.protocol.shard_map import ShardMap, empty_map
from echelon.server.protocol.shard_sets import ShardSet, ShardSetCache
from echelon.server.replica.replica_link import Arrays, Meta, PendingAck, ReplicaLink
from echelon.server.replica.shard_state import ReplicaDiverged, ShardState
from echelon.server.store import SnapshotPart

LEASE = 0.3  # seconds for which a backup's answer lets its head serve reads
#: Raised by a handler when a frame's contents are not those of its kind.
MALFORMED_ERRORS = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, MemoryError)

#: A worker's frame that cannot be answered yet: the connection, the frame, its shards.
WaitingRequest = tuple[Hashable, wire.Frame, ShardSet]


@dataclass(slots=True, kw_only=True, eq=False)
class ReplicaState:
    """Everything one replica knows. Boolean arrays have one element per shard."""

    name: str
    incarnation: int
    shards: ShardState
    lease: float = LEASE
    #: `load_shard(folder, shard)` reads a shard of a checkpoint; `declare_spec(document)` creates a table or dense parameter.
    load_shard: Callable[[str, int], Sequence[SnapshotPart]] | None = None
    declare_spec: Callable[[dict[str, Any]], None] | None = None
    map: ShardMap = field(init=False)
    specs: list[dict[str, Any]] = field(default_factory=list)
    shard_sets: ShardSetCache = field(init=False)
    actions: list[Action] = field(default_factory=list)
    counters: dict[str, int] = field(init=False)
    target_replicas: int = 1  # the job's replication factor
    controller_heard_at: float = 0.0

    # As head.
    links: dict[str, ReplicaLink] = field(default_factory=dict)
    links_created: int = 0
    is_head: np.ndarray = field(init=False)
    is_ready: np.ndarray = field(init=False)
    is_draining: np.ndarray = field(init=False)
    is_sole_replica: np.ndarray = field(init=False)
    #: Shards to read from a checkpoint: folder, and the map version that ordered it.
    shards_to_load: dict[int, tuple[str, int]] = field(default_factory=dict)
    is_unloaded: np.ndarray = field(init=False)
    #: Drained shards: deadline, shards, whether the controller knows.
    handovers: list[tuple[float, np.ndarray, bool]] = field(default_factory=list)
    max_parts_in_flight: int = 4  # per link
    log_state_requested_at: float = 0.0
    #: When reads of each shard may begin, and the latest of these times.
    reads_allowed_from: np.ndarray = field(init=False)
    all_reads_allowed_from: float = float("-inf")
    blocked_acks: list[PendingAck] = field(default_factory=list)
    waiting_pushes: list[WaitingRequest] = field(default_factory=list)
    waiting_reads: list[WaitingRequest] = field(default_factory=list)
    #: Expiry orders that wait until every shard headed here is ready.
    waiting_expiries: list[wire.Frame] = field(default_factory=list)
    live_slots: list[int] = field(default_factory=list)
    min_clock_cache: np.ndarray | None = None

    # As backup.
    #: The head on each connection: its name and incarnation.
    head_of_peer: dict[Hashable, tuple[str, int]] = field(default_factory=dict)
    #: Of each head: the id of its link and the number of its last message.
    last_received: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    refused_shards: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    frames_awaiting_map: dict[Hashable, list[wire.Frame]] = field(default_factory=dict)
    requested_map_version: int = -1
    incoming_snapshots: dict[int, list[SnapshotPart]] = field(default_factory=dict)
    last_answered: dict[str, float] = field(default_factory=dict)
    acceptance_cache: dict[tuple[str, int, ShardSet], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_shards = self.shards.num_shards
        self.map, self.shard_sets = empty_map(num_shards), ShardSetCache(num_shards)
        for name in ("is_head", "is_ready", "is_draining", "is_sole_replica", "is_unloaded"):
            setattr(self, name, np.zeros(num_shards, bool))
        self.reads_allowed_from = np.full(num_shards, -np.inf)
        self.counters = dict.fromkeys(("pushes", "pulls", "entries", "rows", "refused", "stale"), 0)

    def take_actions(self) -> list[Action]:
        actions, self.actions = self.actions, []
        return actions

    def send_to_peer(self, peer: Hashable, kind: int, request_id: int, meta: Meta, arrays: Arrays = ()) -> None:
        """Send over a connection that the other side opened."""
        self.actions.append(Send(PEER, peer, kind, request_id, meta, arrays))

    def send_to_replica(self, server: str, kind: int, meta: Meta, arrays: Arrays = ()) -> None:
        """Send over our connection to another server."""
        self.actions.append(Send(LINK, server, kind, 0, meta, arrays))

    def send_to_controller(self, kind: int, meta: Meta) -> None:
        self.actions.append(Send(CONTROL, None, kind, 0, meta))

    def map_update(self) -> Meta:
        """What MAP_UPDATE carries to other servers."""
        return {"map": self.map.to_document(), "specs": self.specs}

    def send_stale(self, peer: Hashable, request_id: int) -> None:
        """Answer that another server heads these shards: nothing was done."""
        self.counters["stale"] += 1
        self.send_to_peer(peer, wire.STALE_MAP, request_id, {"version": self.map.version})

    def refuse(self, peer: Hashable, frame: wire.Frame, error: str, message: str) -> None:
        """Answer that a request fails for good."""
        self.counters["refused"] += 1
        self.send_to_peer(peer, wire.REFUSED, frame.request_id, {"error": error, "message": message})

    def reject_malformed(self, peer: Hashable, frame: wire.Frame, error: Exception) -> None:
        """Close a connection that sent a malformed frame; from a head it means that we diverged."""
        if peer in self.head_of_peer:
            raise ReplicaDiverged(f"{frame} of {self.head_of_peer[peer]}: {type(error).__name__}: {error}") from error
        reason = f"{wire.KIND_NAMES.get(frame.kind, frame.kind)}: {type(error).__name__}: {error}"
        self.actions += [LogEvent("garbage", {"why": reason}), Close(PEER, peer)]

    def parse_shard_set(self, frame: wire.Frame) -> ShardSet:
        """The shards of a worker's frame: its first array."""
        shard_set = self.shard_sets.get(frame.arrays[0])
        if type(frame.meta["version"]) is not int:
            raise wire.WireError(f"{wire.KIND_NAMES[frame.kind]}: version {frame.meta['version']!r} is not an integer")
        return shard_set

    def update_ready(self) -> None:
        """Recompute which shards take pushes: headed, loaded, not draining, equal on all backups."""
        is_ready = self.is_head & ~self.is_draining & ~self.is_unloaded
        for link in self.links.values():
            is_ready &= ~link.is_backup | link.is_synced
        self.is_ready = is_ready
