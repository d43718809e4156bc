"""What all rooms of the controller share: what it knows, what of it is durable, how a map is published."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from echelon.errors import DocumentError, ServerError
from echelon.server.protocol import wire
from echelon.server.protocol.actions import PEER, Action, Persist, Send
from echelon.server.protocol.shard_map import Map, empty

#: A server without a sign of life for so long is dead: the shortest is a few beats, and while one waits for the longest nothing is pushed.
SERVER_LEASE, SHORTEST_LEASE, LONGEST_LEASE = 0.6, 0.5, 60.0
#: Members of the map are given so long to come back, after our own restart, and shards to return before they go back to a checkpoint.
GRACE = 2.0
FORMAT = 1


@dataclass(slots=True)
class Session:
    """A connection of someone who joined."""

    role: str
    name: str
    incarnation: int
    heard: float
    installed: int = 0


@dataclass(slots=True)
class Answer:
    """An answer that waits until all servers have a version of the map."""

    version: int
    peer: Hashable
    request: int
    kind: int
    meta: dict[str, Any]


@dataclass(slots=True)
class Offer:
    """Something declared of which not all servers have said yet that they can hold it."""

    spec: dict[str, Any]
    askers: list[tuple[Hashable, int]]
    able: set[str] = field(default_factory=set)
    again: float = float("-inf")


@dataclass(slots=True)
class Writing:
    """A checkpoint of which heads write the shards, and all who wait for it."""

    number: int
    path: str
    askers: list[tuple[Hashable, int]]
    files: dict[int, dict[str, Any]] = field(default_factory=dict)
    again: float = float("-inf")


@dataclass(slots=True)
class Expiring:
    """Rows that servers were asked to forget: who waits, and which lives of servers owe an answer, asked over which connection."""

    peer: Hashable
    request: int
    meta: dict[str, Any]
    owing: dict[tuple[str, int], Hashable | None]
    #: Of the shards, when they were asked: where a head changed meanwhile, its shard may have been expired by neither.
    epochs: tuple[int, ...]


class Ground:
    """Fields, the document, maps and answers on their way."""

    def __init__(
        self,
        document: Mapping[str, Any] | None,
        *,
        shards: int = 256,
        replicas: int = 2,
        expect: int = 1,
        settings: Mapping[str, Any] | None = None,
        now: float = 0.0,
        lease: float = SERVER_LEASE,
        restore: tuple[str, Sequence[dict[str, Any]], int] | None = None,
    ) -> None:
        self.map, self.specs, self.replicas, self.expect = empty(shards), [], replicas, expect
        if not SHORTEST_LEASE <= lease <= LONGEST_LEASE:
            raise ServerError(
                f"lease: {lease} s; servers are missed after {SHORTEST_LEASE} to {LONGEST_LEASE:g} s without a sign of life"
            )
        self._lease = lease
        self.settings: dict[str, Any] = dict(settings or {})
        self.count = 0
        self.leaving: set[str] = set()
        self.checkpoint: str | None = None
        #: Why the checkpoint that lost shards were to come back from could not be read.
        self.unreadable: str | None = None
        self.graves: dict[str, int] = {}
        self._restoring: str | None = None
        if restore is not None and document is None:
            # Lives go on counting where the old job's stopped: windows in the checkpoint are of those.
            self._restoring, specs, self.count = restore
            self.specs = list(specs)
            self.checkpoint = self._restoring
            # Nobody of the old job comes here.
            self.map = replace(self.map, horizon=self.count)
        if document is not None:
            self._read(document)
        self.sessions: dict[Hashable, Session] = {}
        #: Members of the map without a connection, and since when.
        self.absent: dict[tuple[str, str], float] = dict.fromkeys(self._members(), now + GRACE)
        self.reports: dict[str, dict[str, Any]] = {}
        self._answers: list[Answer] = []
        self._watchers: list[tuple[Hashable, int, int]] = []
        #: (shard, learner) without whose answer nothing is acknowledged any more, and since when. It has everything.
        self._caught: dict[tuple[int, str], float] = {}
        self._handing: dict[str, tuple[float, list[int]]] = {}
        self._drained: set[int] = set()
        self._calm = self._ticked = now
        self._lost_since = now
        self._leavers: list[tuple[str, Hashable, int]] = []
        self._writing: Writing | None = None
        self._expiring: dict[int, Expiring] = {}
        self._numbers = 0
        self._offers: dict[int, Offer] = {}
        #: (head, replica): until when they are not paired again.
        self._shunned: dict[tuple[str, str], float] = {}
        #: Lives of workers that left, and when; from when on all of those that left are known.
        self._departed: dict[int, float] = {}
        self._known_since = now
        self._out: list[Action] = []

    def _read(self, document: Mapping[str, Any]) -> None:
        try:
            if document["format"] != FORMAT:
                raise DocumentError(
                    f"controller: format {document['format']!r} where {FORMAT} is read; start with a new folder"
                )
            self.map, self.specs = Map.from_document(document["map"]), list(document["specs"])
            self.replicas, self.expect = int(document["replicas"]), int(document["expect"])
            self.settings = dict(document["settings"])
            self.count = int(document["count"])
            self.leaving = set(document["leaving"])
            self.checkpoint = document["checkpoint"]
            self.unreadable = document.get("unreadable")
            self.graves = {str(name): int(life) for name, life in document["graves"].items()}
            self._restoring = document["restoring"]
        except (KeyError, TypeError, ValueError) as error:
            raise DocumentError(
                f"controller: {type(error).__name__}: {error}; the document is not one of a controller"
            ) from None

    def document(self) -> dict[str, Any]:
        """All that a next life needs."""
        return {
            "format": FORMAT,
            "map": self.map.document(),
            "specs": self.specs,
            "replicas": self.replicas,
            "expect": self.expect,
            "settings": self.settings,
            "count": self.count,
            "leaving": sorted(self.leaving),
            "checkpoint": self.checkpoint,
            "unreadable": self.unreadable,
            "graves": self.graves,
            "restoring": self._restoring,
        }

    def _actions(self) -> list[Action]:
        out, self._out = self._out, []
        return out

    def _members(self) -> list[tuple[str, str]]:
        return [("server", name) for name in self.map.servers] + [("worker", name) for name in self.map.workers]

    def _send(self, peer: Hashable, kind: int, request: int, meta: dict[str, Any]) -> None:
        self._out.append(Send(PEER, peer, kind, request, meta))

    def _refuse(self, peer: Hashable, request: int, error: str, message: str) -> None:
        self._send(peer, wire.REFUSED, request, {"error": error, "message": message})

    def _peer_of(self, role: str, name: str) -> Hashable | None:
        found = (peer for peer, each in self.sessions.items() if each.role == role and each.name == name)
        return next(found, None)

    def _head(self, session: Session, shard: int) -> bool:
        return session.role == "server" and self.map.heads[shard] == session.name

    def _told(self) -> dict[str, Any]:
        return {
            "map": self.map.document(),
            "specs": self.specs,
            "settings": self.settings | {"replicas": self.replicas},
        }

    def _grant(self, peer: Hashable) -> None:
        self._send(peer, wire.GRANT, 0, {"map": self.map.document(), "specs": self.specs})

    def _publish(self, **changes: Any) -> None:
        """A new version: on the disk, then to the servers, then to whoever watches. Epochs follow from who is head."""
        version = self.map.version + 1
        chains = changes.get("chains", self.map.chains)
        epochs = tuple(
            version if new[:1] != old[:1] else epoch
            for new, old, epoch in zip(chains, self.map.chains, self.map.epochs, strict=True)
        )
        self.map = replace(self.map, version=version, epochs=epochs, **changes)
        # What a head said of a learner holds under that head only: the next one may acknowledge without it.
        self._caught = {
            (shard, name): at
            for (shard, name), at in self._caught.items()
            if epochs[shard] < version and name in self.map.learners[shard]
        }
        self._out.append(Persist(self.document()))
        for peer, session in self.sessions.items():
            if session.role == "server":
                self._grant(peer)
        watchers, self._watchers = self._watchers, []
        for peer, request, _ in watchers:
            self._send(peer, wire.MAP, request, self._told())

    def _installed(self, session: Session, version: int) -> None:
        session.installed = max(session.installed, version)
        self._settle_answers()

    def _settle_answers(self) -> None:
        least = min((self._version_of(name) for name in self.map.servers), default=self.map.version)
        due = [each for each in self._answers if each.version <= least]
        self._answers = [each for each in self._answers if each.version > least]
        for answer in due:
            meta = answer.meta | self._told() if answer.kind == wire.MAP else answer.meta
            self._send(answer.peer, answer.kind, answer.request, meta)

    def _version_of(self, server: str) -> int:
        peer = self._peer_of("server", server)
        return -1 if peer is None else self.sessions[peer].installed

    def _settled(self) -> bool:
        return all(self._version_of(name) >= self.map.version for name in self.map.servers)

    def _later(self, peer: Hashable, request: int, kind: int, meta: dict[str, Any]) -> None:
        self._answers.append(Answer(version=self.map.version, peer=peer, request=request, kind=kind, meta=meta))
        self._settle_answers()
