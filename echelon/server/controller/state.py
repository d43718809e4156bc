"""What all rooms of the controller share: what it knows, what of it is durable, how a map is published."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from echelon.errors import DocumentError, ServerError
from echelon.server.protocol import wire
from echelon.server.protocol.actions import PEER, Action, Persist, Send
from echelon.server.protocol.shard_map import ShardMap, empty_map

#: A server without a sign of life for so long is dead: the shortest is a few beats, and while one waits for the longest nothing is pushed.
SERVER_LEASE, SHORTEST_LEASE, LONGEST_LEASE = 0.6, 0.5, 60.0
#: Members of the map are given so long to come back, after our own restart, and shards to return before they go back to a checkpoint.
REJOIN_GRACE = 2.0
DOCUMENT_FORMAT = 1


@dataclass(slots=True)
class MemberSession:
    """A connection of someone who joined."""

    role: str
    name: str
    incarnation: int
    last_heard: float
    map_version: int = 0


@dataclass(slots=True)
class DeferredAnswer:
    """An answer that waits until all servers have a version of the map."""

    version: int
    peer: Hashable
    request_id: int
    kind: int
    meta: dict[str, Any]


@dataclass(slots=True)
class PendingDeclaration:
    """Something declared of which not all servers have said yet that they can hold it."""

    spec: dict[str, Any]
    requesters: list[tuple[Hashable, int]]
    accepted_by: set[str] = field(default_factory=set)
    retry_at: float = float("-inf")


@dataclass(slots=True)
class RunningCheckpoint:
    """A checkpoint of which heads write the shards, and all who wait for it."""

    checkpoint_id: int
    path: str
    requesters: list[tuple[Hashable, int]]
    files: dict[int, dict[str, Any]] = field(default_factory=dict)
    retry_at: float = float("-inf")


@dataclass(slots=True)
class PendingExpiry:
    """Rows that servers were asked to forget: who waits, and which lives of servers owe an answer, asked over which connection."""

    peer: Hashable
    request_id: int
    meta: dict[str, Any]
    unanswered: dict[tuple[str, int], Hashable | None]
    #: Of the shards, when they were asked: where a head changed meanwhile, its shard may have been expired by neither.
    epochs: tuple[int, ...]


class ControllerState:
    """Fields, the document, maps and answers on their way."""

    def __init__(
        self,
        document: Mapping[str, Any] | None,
        *,
        num_shards: int = 256,
        replicas: int = 2,
        expect: int = 1,
        settings: Mapping[str, Any] | None = None,
        now: float = 0.0,
        lease: float = SERVER_LEASE,
        restore: tuple[str, Sequence[dict[str, Any]], int] | None = None,
    ) -> None:
        self.map, self.specs, self.replicas, self.expect = empty_map(num_shards), [], replicas, expect
        if not SHORTEST_LEASE <= lease <= LONGEST_LEASE:
            raise ServerError(
                f"lease: {lease} s; servers are missed after {SHORTEST_LEASE} to {LONGEST_LEASE:g} s without a sign of life"
            )
        self._lease = lease
        self.settings: dict[str, Any] = dict(settings or {})
        self.last_incarnation = 0
        self.leaving: set[str] = set()
        self.last_checkpoint: str | None = None
        #: Why the checkpoint that lost shards were to come back from could not be read.
        self.checkpoint_error: str | None = None
        self.dead_servers: dict[str, int] = {}
        self._restore_folder: str | None = None
        if restore is not None and document is None:
            # Lives go on counting where the old job's stopped: windows in the checkpoint are of those.
            self._restore_folder, specs, self.last_incarnation = restore
            self.specs = list(specs)
            self.last_checkpoint = self._restore_folder
            # Nobody of the old job comes here.
            self.map = replace(self.map, horizon=self.last_incarnation)
        if document is not None:
            self._load_document(document)
        self.sessions: dict[Hashable, MemberSession] = {}
        #: Members of the map without a connection, and since when.
        self.disconnect_deadlines: dict[tuple[str, str], float] = dict.fromkeys(self._member_keys(), now + REJOIN_GRACE)
        self.reports: dict[str, dict[str, Any]] = {}
        self._deferred_answers: list[DeferredAnswer] = []
        self._watchers: list[tuple[Hashable, int, int]] = []
        #: (shard, learner) without whose answer nothing is acknowledged any more, and since when. It has everything.
        self._caught_up: dict[tuple[int, str], float] = {}
        self._handovers: dict[str, tuple[float, list[int]]] = {}
        self._drained_shards: set[int] = set()
        self._rebalance_after = self._last_tick = now
        self._lost_since = now
        self._drain_requests: list[tuple[str, Hashable, int]] = []
        self._running_checkpoint: RunningCheckpoint | None = None
        self._expiries: dict[int, PendingExpiry] = {}
        self._last_request_id = 0
        self._declarations: dict[int, PendingDeclaration] = {}
        #: (head, replica): until when they are not paired again.
        self._avoided_until: dict[tuple[str, str], float] = {}
        #: Lives of workers that left, and when; from when on all of those that left are known.
        self._departed_at: dict[int, float] = {}
        self._departures_known_since = now
        self._queued_actions: list[Action] = []

    def _load_document(self, document: Mapping[str, Any]) -> None:
        try:
            if document["format"] != DOCUMENT_FORMAT:
                raise DocumentError(
                    f"controller: format {document['format']!r} where {DOCUMENT_FORMAT} is read; start with a new folder"
                )
            self.map, self.specs = ShardMap.from_document(document["map"]), list(document["specs"])
            self.replicas, self.expect = int(document["replicas"]), int(document["expect"])
            self.settings = dict(document["settings"])
            self.last_incarnation = int(document["count"])
            self.leaving = set(document["leaving"])
            self.last_checkpoint = document["checkpoint"]
            self.checkpoint_error = document.get("unreadable")
            self.dead_servers = {str(name): int(incarnation) for name, incarnation in document["graves"].items()}
            self._restore_folder = document["restoring"]
        except (KeyError, TypeError, ValueError) as error:
            raise DocumentError(
                f"controller: {type(error).__name__}: {error}; the document is not one of a controller"
            ) from None

    def to_document(self) -> dict[str, Any]:
        """All that a next life needs."""
        return {
            "format": DOCUMENT_FORMAT,
            "map": self.map.to_document(),
            "specs": self.specs,
            "replicas": self.replicas,
            "expect": self.expect,
            "settings": self.settings,
            "count": self.last_incarnation,
            "leaving": sorted(self.leaving),
            "checkpoint": self.last_checkpoint,
            "unreadable": self.checkpoint_error,
            "graves": self.dead_servers,
            "restoring": self._restore_folder,
        }

    def _take_actions(self) -> list[Action]:
        actions, self._queued_actions = self._queued_actions, []
        return actions

    def _member_keys(self) -> list[tuple[str, str]]:
        return [("server", name) for name in self.map.servers] + [("worker", name) for name in self.map.workers]

    def _send(self, peer: Hashable, kind: int, request_id: int, meta: dict[str, Any]) -> None:
        self._queued_actions.append(Send(PEER, peer, kind, request_id, meta))

    def _refuse(self, peer: Hashable, request_id: int, error: str, message: str) -> None:
        self._send(peer, wire.REFUSED, request_id, {"error": error, "message": message})

    def _find_peer(self, role: str, name: str) -> Hashable | None:
        peers = (peer for peer, session in self.sessions.items() if session.role == role and session.name == name)
        return next(peers, None)

    def _is_head(self, session: MemberSession, shard: int) -> bool:
        return session.role == "server" and self.map.heads[shard] == session.name

    def _map_answer(self) -> dict[str, Any]:
        return {
            "map": self.map.to_document(),
            "specs": self.specs,
            "settings": self.settings | {"replicas": self.replicas},
        }

    def _send_map_update(self, peer: Hashable) -> None:
        self._send(peer, wire.MAP_UPDATE, 0, {"map": self.map.to_document(), "specs": self.specs})

    def _publish_map(self, **changes: Any) -> None:
        """A new version: on the disk, then to the servers, then to whoever watches. Epochs follow from who is head."""
        version = self.map.version + 1
        chains = changes.get("chains", self.map.chains)
        epochs = tuple(
            version if new_chain[:1] != old_chain[:1] else epoch
            for new_chain, old_chain, epoch in zip(chains, self.map.chains, self.map.epochs, strict=True)
        )
        self.map = replace(self.map, version=version, epochs=epochs, **changes)
        # What a head said of a learner holds under that head only: the next one may acknowledge without it.
        self._caught_up = {
            (shard, name): since
            for (shard, name), since in self._caught_up.items()
            if epochs[shard] < version and name in self.map.learners[shard]
        }
        self._queued_actions.append(Persist(self.to_document()))
        for peer, session in self.sessions.items():
            if session.role == "server":
                self._send_map_update(peer)
        watchers, self._watchers = self._watchers, []
        for peer, request_id, _ in watchers:
            self._send(peer, wire.MAP, request_id, self._map_answer())

    def _on_map_installed(self, session: MemberSession, version: int) -> None:
        session.map_version = max(session.map_version, version)
        self._send_due_answers()

    def _send_due_answers(self) -> None:
        oldest_version = min((self._installed_version(name) for name in self.map.servers), default=self.map.version)
        due = [deferred for deferred in self._deferred_answers if deferred.version <= oldest_version]
        self._deferred_answers = [deferred for deferred in self._deferred_answers if deferred.version > oldest_version]
        for answer in due:
            meta = answer.meta | self._map_answer() if answer.kind == wire.MAP else answer.meta
            self._send(answer.peer, answer.kind, answer.request_id, meta)

    def _installed_version(self, server: str) -> int:
        peer = self._find_peer("server", server)
        return -1 if peer is None else self.sessions[peer].map_version

    def _is_map_installed(self) -> bool:
        return all(self._installed_version(name) >= self.map.version for name in self.map.servers)

    def _answer_once_installed(self, peer: Hashable, request_id: int, kind: int, meta: dict[str, Any]) -> None:
        self._deferred_answers.append(
            DeferredAnswer(version=self.map.version, peer=peer, request_id=request_id, kind=kind, meta=meta)
        )
        self._send_due_answers()
