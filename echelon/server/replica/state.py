"""What all rooms of a replica share: what it holds, and how it says something."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from echelon.server.protocol import wire
from echelon.server.protocol.actions import CONTROL, LINK, PEER, Action, Close, Note, Send
from echelon.server.protocol.shard_map import Map, empty
from echelon.server.protocol.shard_sets import Cover, Covers
from echelon.server.replica.replica_link import Link, Waiting
from echelon.server.replica.shard_state import Diverged, Part, State, Store

LEASE = 0.3
#: Parts of a snapshot that are sent and not answered, at once.
PARTS = 4
#: What a frame with other contents than its kind should have makes a handler raise.
MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, MemoryError)


class Ground:
    """Fields, and the ways out."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        store: Store,
        shards: int,
        lease: float = LEASE,
        load: Callable[[str, int], Sequence[Part]] | None = None,
        declare: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.name, self.incarnation, self.lease = name, incarnation, lease
        self.state = State(store, shards)
        self.covers = Covers(shards)
        self.map: Map = empty(shards)
        self.specs: list[dict[str, Any]] = []
        self._load, self._declare = load, declare
        self._out: list[Action] = []
        # As head.
        self.links: dict[str, Link] = {}
        self.headed = np.zeros(shards, bool)
        #: Shards that are yet to be read out of a checkpoint: folder, and the version that ordered it.
        self.loading: dict[int, tuple[str, int]] = {}
        self._unloaded = np.zeros(shards, bool)
        self.ready = np.zeros(shards, bool)
        self.draining = np.zeros(shards, bool)
        self._drains: list[tuple[float, np.ndarray, bool]] = []
        self._links_made = 0
        self.parts = PARTS
        self._asked_at = 0.0
        #: When reads may begin, and when the last of the shards is so far.
        self._reads_from = np.full(shards, -np.inf)
        self._reads_all_from = float("-inf")
        #: Replicas that the job wishes for; when the controller was last heard; shards that we alone have.
        self.wished = 1
        self.confirmed = 0.0
        self._single = np.zeros(shards, bool)
        self._parked: list[Waiting] = []
        self._pushes: list[tuple[Hashable, wire.Frame, Cover]] = []
        self._pulls: list[tuple[Hashable, wire.Frame, Cover]] = []
        #: Orders to expire rows, until all that we head is ready.
        self._expiring: list[wire.Frame] = []
        self._live: list[int] = []
        self._floor: np.ndarray | None = None
        # As backup.
        self._heads: dict[Hashable, tuple[str, int]] = {}
        #: Of each head: the number of its link, and of the last message of that; and shards of which it was refused something.
        self._received: dict[tuple[str, int], tuple[int, int]] = {}
        self._refused: dict[tuple[str, int], set[int]] = {}
        self._stalled: dict[Hashable, list[wire.Frame]] = {}
        self._arriving: dict[int, list[Part]] = {}
        self._answered: dict[str, float] = {}
        self._taking: dict[tuple[str, int, Cover], np.ndarray] = {}
        self._epochs = np.zeros(shards, np.int64)
        self._asked = -1
        self.counts = {"pushes": 0, "pulls": 0, "entries": 0, "rows": 0, "refused": 0, "stale": 0}

    def _garbage(self, peer: Hashable, frame: wire.Frame, error: Exception) -> None:
        if peer in self._heads:
            raise Diverged(f"{frame} of {self._heads[peer]}: {type(error).__name__}: {error}") from error
        why = f"{wire.NAMES.get(frame.kind, frame.kind)}: {type(error).__name__}: {error}"
        self._out += [Note("garbage", {"why": why}), Close(PEER, peer)]

    def _actions(self) -> list[Action]:
        out, self._out = self._out, []
        return out

    def _send(
        self,
        peer: Hashable,
        kind: int,
        request: int,
        meta: dict[str, Any],
        arrays: Sequence[np.ndarray | wire.Pieces] = (),
    ) -> None:
        self._out.append(Send(PEER, peer, kind, request, meta, arrays))

    def _link(
        self, server: str, kind: int, meta: dict[str, Any], arrays: Sequence[np.ndarray | wire.Pieces] = ()
    ) -> None:
        self._out.append(Send(LINK, server, kind, 0, meta, arrays))

    def _tell(self, kind: int, meta: dict[str, Any]) -> None:
        self._out.append(Send(CONTROL, None, kind, 0, meta))

    def _stale(self, peer: Hashable, frame: wire.Frame) -> None:
        self.counts["stale"] += 1
        self._send(peer, wire.STALE, frame.request, {"version": self.map.version})

    def _refuse(self, peer: Hashable, frame: wire.Frame, error: str, message: str) -> None:
        self.counts["refused"] += 1
        self._send(peer, wire.REFUSED, frame.request, {"error": error, "message": message})

    def _checked(self, frame: wire.Frame) -> Cover:
        cover = self.covers.of(frame.arrays[0])
        if type(frame.meta["version"]) is not int:
            raise wire.WireError(f"{wire.NAMES[frame.kind]}: version {frame.meta['version']!r} is no number")
        return cover

    def _readiness(self) -> None:
        ready = self.headed & ~self.draining & ~self._unloaded
        for link in self.links.values():
            ready &= ~link.backup | link.synced
        self.ready = ready
