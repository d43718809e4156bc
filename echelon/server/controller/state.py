"""The state of the controller: what is durable, and what it learns again after a restart; and how a new map is published."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
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


class Refusal(ServerError):  # noqa: N818 (an answer, not a fault)
    """The answer to a request that cannot be granted; `error` is its name on the wire."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.error = error


@dataclass(slots=True)
class MemberSession:
    """The connection of a member that joined."""

    peer: Hashable
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
    """A declaration that not all servers have accepted yet."""

    spec: dict[str, Any]
    requesters: list[tuple[Hashable, int]]
    accepted_by: set[str] = field(default_factory=set)
    retry_at: float = float("-inf")


@dataclass(slots=True)
class RunningCheckpoint:
    """A checkpoint whose shards the heads write, and who waits for it."""

    checkpoint_id: int
    path: str
    requesters: list[tuple[Hashable, int]]
    files: dict[int, dict[str, Any]] = field(default_factory=dict)
    retry_at: float = float("-inf")


@dataclass(slots=True)
class PendingExpiry:
    """An expiry order: who waits for it, and which incarnations of servers have yet to answer, asked over which connection."""

    peer: Hashable
    request_id: int
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
    #: Why the last checkpoint could not be read when lost shards needed it.
    checkpoint_error: str | None = None
    #: Servers declared dead whose shards are lost, and their incarnations: they may return.
    dead_servers: dict[str, int] = field(default_factory=dict)
    restore_folder: str | None = None

    # Learned again after a restart.
    started_at: float = 0.0
    lease: float = SERVER_LEASE
    sessions: dict[Hashable, MemberSession] = field(default_factory=dict)
    #: Members of the map without a connection: when they are declared dead.
    disconnect_deadlines: dict[tuple[str, str], float] = field(init=False)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    deferred_answers: list[DeferredAnswer] = field(default_factory=list)
    watchers: list[tuple[Hashable, int, int]] = field(default_factory=list)
    #: (shard, learner) whose acknowledgement is required by now, and since when. The learner lacks nothing.
    caught_up: dict[tuple[int, str], float] = field(default_factory=dict)
    #: Heads that hand over: deadline and shards.
    handovers: dict[str, tuple[float, list[int]]] = field(default_factory=dict)
    drained_shards: set[int] = field(default_factory=set)
    rebalance_after: float = field(init=False)
    last_tick: float = field(init=False)
    lost_since: float = field(init=False)
    drain_requests: list[tuple[str, Hashable, int]] = field(default_factory=list)
    running_checkpoint: RunningCheckpoint | None = None
    expiries: dict[int, PendingExpiry] = field(default_factory=dict)
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
            "restoring": self.restore_folder,
        }

    def job_settings(self) -> dict[str, Any]:
        """The settings that a job keeps for life."""
        return {"shards": self.map.num_shards, "replicas": self.replicas, **self.settings}

    # Actions

    def take_actions(self) -> list[Action]:
        actions, self.actions = self.actions, []
        return actions

    def send(self, peer: Hashable, kind: int, request_id: int, meta: dict[str, Any]) -> None:
        self.actions.append(Send(PEER, peer, kind, request_id, meta))

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
        session = next((each for each in self.sessions.values() if each.role == role and each.name == name), None)
        return None if session is None else session.peer

    def is_head(self, session: MemberSession, shard: int) -> bool:
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
        epochs = tuple(
            version if new_chain[:1] != old_chain[:1] else epoch
            for new_chain, old_chain, epoch in zip(chains, self.map.chains, self.map.epochs, strict=True)
        )
        self.map = replace(self.map, version=version, epochs=epochs, **changes)
        # A head's report on a learner holds under that head only: the next one may acknowledge without the learner.
        self.caught_up = {
            (shard, name): since
            for (shard, name), since in self.caught_up.items()
            if epochs[shard] < version and name in self.map.learners[shard]
        }
        self.persist()
        for session in self.sessions.values():
            if session.role == "server":
                self.send_map_update(session.peer)
        watchers, self.watchers = self.watchers, []
        for peer, request_id, _ in watchers:
            self.send(peer, wire.MAP, request_id, self.map_answer())

    def publish_chains(self, chains: Sequence[tuple[str, ...]], learners: Sequence[tuple[str, ...]]) -> bool:
        """A new version with these chains and learners, if they differ."""
        if tuple(chains) == self.map.chains and tuple(learners) == self.map.learners:
            return False
        self.publish_map(chains=chains, learners=learners)
        return True

    def installed_version(self, server: str) -> int:
        """The map version that a server has; -1 without a connection."""
        peer = self.find_peer("server", server)
        return -1 if peer is None else self.sessions[peer].map_version

    def is_map_installed(self) -> bool:
        return all(self.installed_version(name) >= self.map.version for name in self.map.servers)

    def answer_once_installed(self, peer: Hashable, request_id: int, kind: int, meta: dict[str, Any]) -> None:
        self.deferred_answers.append(DeferredAnswer(self.map.version, peer, request_id, kind, meta))
        self.send_due_answers()

    def send_due_answers(self) -> None:
        """Send the answers whose map version every server has."""
        oldest_version = min((self.installed_version(name) for name in self.map.servers), default=self.map.version)
        due = [deferred for deferred in self.deferred_answers if deferred.version <= oldest_version]
        self.deferred_answers = [deferred for deferred in self.deferred_answers if deferred.version > oldest_version]
        for answer in due:
            meta = self.map_answer(**answer.meta) if answer.kind == wire.MAP else answer.meta
            self.send(answer.peer, answer.kind, answer.request_id, meta)


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
    controller = ControllerState(
        map=empty_map(num_shards),
        replicas=replicas,
        expect=expect,
        settings=dict(settings or {}),
        started_at=now,
        lease=lease,
    )
    if restore is not None:
        # Incarnations continue where the old job's ended: the checkpoint's deduplication state is of those. None of its workers comes here.
        folder, specs, controller.last_incarnation = restore
        controller.restore_folder = controller.last_checkpoint = folder
        controller.specs = list(specs)
        controller.map = replace(controller.map, horizon=controller.last_incarnation)
    return controller


def _load_document(document: Mapping[str, Any], now: float, lease: float) -> ControllerState:
    try:
        if document["format"] != DOCUMENT_FORMAT:
            raise DocumentError(
                f"controller: format {document['format']!r}, expected {DOCUMENT_FORMAT}; start with a new folder"
            )
        return ControllerState(
            map=ShardMap.from_document(document["map"]),
            specs=list(document["specs"]),
            replicas=int(document["replicas"]),
            expect=int(document["expect"]),
            settings=dict(document["settings"]),
            last_incarnation=int(document["count"]),
            leaving=set(document["leaving"]),
            last_checkpoint=document["checkpoint"],
            checkpoint_error=document.get("unreadable"),
            dead_servers={str(name): int(incarnation) for name, incarnation in document["graves"].items()},
            restore_folder=document["restoring"],
            started_at=now,
            lease=lease,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DocumentError(f"controller: {type(error).__name__}: {error}; not a controller's document") from None
