"""The state of the controller: what is durable, and what it learns again after a restart; and how a new map is published."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from echelon.errors import DocumentError, ServerError
from echelon.server.protocol import wire
from echelon.server.protocol.actions import PEER, Action, Close, LogEvent, Persist, Send
from echelon.server.protocol.shard_map import ShardMap, empty_map

#: Seconds of silence after which a server is declared dead; while it lasts, pushes to the server's shards wait.
SERVER_LEASE, SHORTEST_LEASE, LONGEST_LEASE = 0.6, 0.5, 60.0
#: How long members may take to come back after our own restart, and lost shards to return before they are rolled back to a checkpoint.
REJOIN_GRACE = 2.0
DOCUMENT_FORMAT = 1
#: What is durable besides the map: names in the document, and how the values are read.
DURABLE_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "specs": ("specs", list),
    "replicas": ("replicas", int),
    "expect": ("expect", int),
    "settings": ("settings", dict),
    "last_incarnation": ("count", int),
    "leaving": ("leaving", set),
    "last_checkpoint": ("checkpoint", lambda path: path),
    "checkpoint_error": ("unreadable", lambda reason: reason),
    "dead_servers": ("graves", dict),
    "restore_folder": ("restoring", lambda path: path),
}


Chain = tuple[str, ...]  # the servers of a shard, head first
Requester = tuple[Hashable, int]  # who waits for an answer: the connection and the request


class Refusal(ServerError):  # noqa: N818 (an answer, not a fault)
    """The answer to a request that cannot be granted; `error` is its name on the wire."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.error = error


@dataclass(slots=True)
class Session:
    """The connection of a member that joined."""

    peer: Hashable
    role: str
    name: str
    incarnation: int
    last_heard: float
    map_version: int = 0


@dataclass(slots=True)
class PendingDeclaration:
    """A declaration that not all servers have accepted yet."""

    spec: dict[str, Any]
    requesters: list[Requester]
    accepted_by: set[str] = field(default_factory=set)
    retry_at: float = float("-inf")


@dataclass(slots=True)
class RunningCheckpoint:
    """A checkpoint whose shards the heads write, and who waits for it."""

    checkpoint_id: int
    path: str
    requesters: list[Requester]
    files: dict[int, dict[str, Any]] = field(default_factory=dict)
    retry_at: float = float("-inf")


@dataclass(slots=True)
class Expiry:
    """An expiry order, who waits for it, and which incarnations of servers have yet to answer, asked over which connection."""

    requester: Requester
    meta: dict[str, Any]
    unanswered: dict[tuple[str, int], Hashable | None]
    #: The map's epochs when they were asked: a shard whose head changed since may have been expired by neither.
    epochs: tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class ControllerState:
    """Everything the controller knows."""

    # Durable: `to_document`.
    map: ShardMap
    specs: list[dict[str, Any]] = field(default_factory=list)
    replicas: int = 2
    expect: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    last_incarnation: int = 0
    leaving: set[str] = field(default_factory=set)
    last_checkpoint: str | None = None
    checkpoint_error: str | None = None  # why the last checkpoint could not be read when lost shards needed it
    #: Servers declared dead whose shards are lost, and their incarnations: they may return.
    dead_servers: dict[str, int] = field(default_factory=dict)
    restore_folder: str | None = None

    # Learned again after a restart.
    started_at: float = 0.0
    lease: float = SERVER_LEASE
    sessions: dict[Hashable, Session] = field(default_factory=dict)
    #: Members of the map without a connection: when they are declared dead.
    disconnect_deadlines: dict[tuple[str, str], float] = field(init=False)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Answers that wait until all servers have a version of the map: that version, who waits, kind, meta.
    deferred_answers: list[tuple[int, Requester, int, dict[str, Any]]] = field(default_factory=list)
    watchers: list[Requester] = field(default_factory=list)
    #: (shard, learner) whose acknowledgement is required by now, and since when. The learner lacks nothing.
    caught_up: dict[tuple[int, str], float] = field(default_factory=dict)
    #: Heads that hand over: deadline and shards.
    handovers: dict[str, tuple[float, list[int]]] = field(default_factory=dict)
    drained_shards: set[int] = field(default_factory=set)
    rebalance_after: float = field(init=False)
    last_tick: float = field(init=False)
    lost_since: float = field(init=False)
    drain_requests: list[tuple[str, Requester]] = field(default_factory=list)
    running_checkpoint: RunningCheckpoint | None = None
    expiries: dict[int, Expiry] = field(default_factory=dict)
    declarations: dict[int, PendingDeclaration] = field(default_factory=dict)
    last_request_id: int = 0
    #: (head, replica) that cannot reach each other: until when they are not paired again.
    avoided_until: dict[tuple[str, str], float] = field(default_factory=dict)
    #: Incarnations of workers that left since `started_at`, and when.
    departed_at: dict[int, float] = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rebalance_after = self.last_tick = self.lost_since = self.started_at
        members = [*(("server", name) for name in self.map.servers), *(("worker", name) for name in self.map.workers)]
        self.disconnect_deadlines = dict.fromkeys(members, self.started_at + REJOIN_GRACE)

    def to_document(self) -> dict[str, Any]:
        """What a restarted controller needs."""
        fields = {key: getattr(self, name) for name, (key, _) in DURABLE_FIELDS.items()}
        fields["leaving"] = sorted(self.leaving)
        return {"format": DOCUMENT_FORMAT, "map": self.map.to_document(), **fields}

    def job_settings(self) -> dict[str, Any]:
        """The settings that a job keeps for life."""
        return {"shards": self.map.num_shards, "replicas": self.replicas, **self.settings}

    # Actions

    def take_actions(self) -> list[Action]:
        actions, self.actions = self.actions, []
        return actions

    def send(self, peer: Hashable, kind: int, request_id: int, meta: dict[str, Any]) -> None:
        self.actions.append(Send(PEER, peer, kind, request_id, meta))

    def send_to_server(self, name: str, kind: int, meta: dict[str, Any]) -> None:
        """Send to a server, if it has a connection."""
        if (peer := self.find_peer("server", name)) is not None:
            self.send(peer, kind, 0, meta)

    def refuse(self, peer: Hashable, request_id: int, error: str, message: str) -> None:
        self.send(peer, wire.REFUSED, request_id, {"error": error, "message": message})

    def close(self, peer: Hashable) -> None:
        self.actions.append(Close(PEER, peer))

    def log(self, event: str, **details: Any) -> None:
        self.actions.append(LogEvent(event, details))

    def persist(self) -> None:
        """Write the document, before any action that follows."""
        self.actions.append(Persist(self.to_document()))

    # Members

    def find_peer(self, role: str, name: str) -> Hashable | None:
        """The connection of a member, if it has one."""
        sessions = self.sessions.items()
        return next((peer for peer, session in sessions if (session.role, session.name) == (role, name)), None)

    def live_servers(self) -> set[tuple[str, int]]:
        """Names and incarnations."""
        return {(name, entry.incarnation) for name, entry in self.map.servers.items()}

    def is_head(self, session: Session, shard: int) -> bool:
        return session.role == "server" and self.map.heads[shard] == session.name

    # Maps

    def map_answer(self, **more: Any) -> dict[str, Any]:
        """The answer to members that join and to watchers."""
        settings = self.settings | {"replicas": self.replicas}
        return {"map": self.map.to_document(), "specs": self.specs, "settings": settings, **more}

    def send_map_update(self, peer: Hashable) -> None:
        self.send(peer, wire.MAP_UPDATE, 0, {"map": self.map.to_document(), "specs": self.specs})

    def publish_map(self, **changes: Any) -> None:
        """A new version: to the disk, then to the servers, then to watchers. An epoch changes where the head does."""
        changes |= {name: tuple(changes[name]) for name in ("chains", "learners") if name in changes}
        version = self.map.version + 1
        chains = changes.get("chains", self.map.chains)
        triples = zip(chains, self.map.chains, self.map.epochs, strict=True)
        epochs = tuple(version if new[:1] != old[:1] else epoch for new, old, epoch in triples)
        self.map = replace(self.map, version=version, epochs=epochs, **changes)
        # A head's report on a learner holds under that head only: the next one may acknowledge without the learner.
        stale = {key for key in self.caught_up if epochs[key[0]] == version or key[1] not in self.map.learners[key[0]]}
        self.caught_up = {key: since for key, since in self.caught_up.items() if key not in stale}
        self.persist()
        for peer, session in self.sessions.items():
            if session.role == "server":
                self.send_map_update(peer)
        watchers, self.watchers = self.watchers, []
        for peer, request_id in watchers:
            self.send(peer, wire.MAP, request_id, self.map_answer())

    def publish_chains(self, chains: Sequence[Chain], learners: Sequence[Chain]) -> bool:
        """A new version with these chains and learners, if they differ."""
        if tuple(chains) == self.map.chains and tuple(learners) == self.map.learners:
            return False
        self.publish_map(chains=chains, learners=learners)
        return True

    def installed_version(self, server: str) -> int:
        """The map version that a server has; -1 without a connection."""
        peer = self.find_peer("server", server)
        return -1 if peer is None else self.sessions[peer].map_version

    def oldest_version(self) -> int:
        """The newest map version that every server has."""
        return min((self.installed_version(name) for name in self.map.servers), default=self.map.version)

    def answer_once_installed(self, requester: Requester, kind: int, meta: dict[str, Any]) -> None:
        self.deferred_answers.append((self.map.version, requester, kind, meta))
        self.send_due_answers()

    def send_due_answers(self) -> None:
        """Send the answers whose map version every server has."""
        deferred_answers, self.deferred_answers, oldest_version = self.deferred_answers, [], self.oldest_version()
        for answer in deferred_answers:
            version, (peer, request_id), kind, meta = answer
            if version > oldest_version:
                self.deferred_answers.append(answer)
            else:
                self.send(peer, kind, request_id, self.map_answer(**meta) if kind == wire.MAP else meta)


def open_controller(
    document: Mapping[str, Any] | None,
    *,
    num_shards: int = 256,
    replicas: int = 2,
    expect: int = 1,
    settings: Mapping[str, Any] | None = None,
    now: float = 0.0,
    lease: float = SERVER_LEASE,
    restore: tuple[str, Sequence[dict[str, Any]], int] | None = None,
) -> ControllerState:
    """A controller that continues from its document; without one, a new job, from a checkpoint if `restore` (folder, specs, incarnation)."""
    if not SHORTEST_LEASE <= lease <= LONGEST_LEASE:
        raise ServerError(f"lease: {lease} s; use {SHORTEST_LEASE} to {LONGEST_LEASE:g} s")
    if document is not None:
        return _load_document(document, now, lease)
    state = ControllerState(map=empty_map(num_shards), replicas=replicas, expect=expect, started_at=now, lease=lease)
    state.settings = dict(settings or {})
    if restore is not None:
        # Incarnations continue where the old job's ended: the checkpoint's deduplication state is of those. None of its workers comes here.
        folder, specs, state.last_incarnation = restore
        state.restore_folder = state.last_checkpoint = folder
        state.specs = list(specs)
        state.map = replace(state.map, horizon=state.last_incarnation)
    return state


def _load_document(document: Mapping[str, Any], now: float, lease: float) -> ControllerState:
    try:
        if (version := document["format"]) != DOCUMENT_FORMAT:
            raise DocumentError(f"controller: format {version!r}, expected {DOCUMENT_FORMAT}; start with a new folder")
        fields: dict[str, Any] = {name: parse(document.get(key)) for name, (key, parse) in DURABLE_FIELDS.items()}
        return ControllerState(map=ShardMap.from_document(document["map"]), started_at=now, lease=lease, **fields)
    except (KeyError, TypeError, ValueError) as error:
        raise DocumentError(f"controller: {type(error).__name__}: {error}; not a controller's document") from None
