"""The controller, without sockets and without a clock: it alone writes the map, and writes it to the disk before anyone sees it.

It notices deaths, shortens chains, gives shards new replicas and moves them to where they are wished, counts workers in and out, keeps
what is declared. Everything durable is in one document; everything else is learnt again after a restart. While it is down nothing
changes and nothing stops.

What it must not do: make a shard's chain of anyone who may lack something acknowledged. Chains only lose members (the rest have
everything), or gain a learner of which the head said, after everything it had been sent was answered, that it has caught up. A change
that nobody's death forces waits until every server has the present map, so that none of them ever misses one that matters to it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from echelon.errors import DocumentError, EchelonError, ServerError
from echelon.server import wire
from echelon.server.actions import PEER, Action, Close, Manifest, Note, Persist, Send
from echelon.server.map import Map, Seat, empty
from echelon.server.placement import behind, ring, wish
from echelon.server.replica import MALFORMED

#: A server without a sign of life for so long is dead: the shortest is a few beats, and while one waits for the longest nothing is pushed.
SERVER_LEASE, SHORTEST_LEASE, LONGEST_LEASE = 0.6, 0.5, 60.0
#: A connection that ended may be made again; a process that was killed does not come back.
RECONNECT = 0.2
WORKER_LEASE = 2.0
WORKER_RECONNECT = 1.0
GRACE = 2.0
#: Membership is left to settle before shards are moved for it.
CALM = 0.3
#: A controller that did not get round to its ticks for so long judges nobody by what it did not hear.
AWAY = 0.3
SHUNNED = 10.0
#: A worker that has been away for so long does not come back under its number; forgotten so many at a time.
AWAY_FOR_EVER = 600.0
FORGOTTEN = 64
#: Learners that caught up are taken in all together, or those of so many seconds: each new map and each new kind of chain costs everyone.
TOGETHER = 10.0
DRAIN_LIMIT = 1.5
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


class Controller:
    """The state machine. `document` is what a former life persisted, or None."""

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
        self._writing: dict[str, Any] | None = None
        self._expiring: dict[int, tuple[Hashable, int, set[str]]] = {}
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
            "graves": self.graves,
            "restoring": self._restoring,
        }

    # What happens

    def on_frame(self, now: float, peer: Hashable, frame: wire.Frame) -> list[Action]:
        """A frame of a server, a worker or an administrator."""
        session = self.sessions.get(peer)
        if session is not None:
            session.heard = now
        try:
            self._receive(now, peer, session, frame)
        except EchelonError as error:
            self._refuse(peer, frame.request, type(error).__name__, str(error))
        except MALFORMED as error:
            why = f"{wire.NAMES.get(frame.kind, frame.kind)}: {type(error).__name__}: {error}"
            self._out += [Note("garbage", {"why": why}), Close(PEER, peer)]
        return self._actions()

    def on_lost(self, now: float, peer: Hashable) -> list[Action]:
        """A connection is gone."""
        session = self.sessions.pop(peer, None)
        self._watchers = [each for each in self._watchers if each[0] != peer]
        if session is not None:
            wait = RECONNECT if session.role == "server" else WORKER_RECONNECT
            self.absent[session.role, session.name] = now + wait
        return self._actions()

    def on_tick(self, now: float) -> list[Action]:
        """Time passes: call it every 50 ms or so."""
        if now - self._ticked > AWAY:
            # We were away ourselves (stopped, or starved of time): what the others said meanwhile is still to be read.
            for session in self.sessions.values():
                session.heard = now
            self.absent = {key: max(until, now + RECONNECT) for key, until in self.absent.items()}
        self._ticked = now
        for peer, session in list(self.sessions.items()):
            limit = self._lease if session.role == "server" else WORKER_LEASE
            if now - session.heard > limit and session.role != "admin":
                del self.sessions[peer]
                self._out.append(Close(PEER, peer))
                self.absent[session.role, session.name] = now
        dead = [key for key, until in self.absent.items() if until <= now]
        if dead:
            self._bury(now, dead)
        self._revive(now)
        if self._settled():
            self._elective(now)
        self._ask_checkpoint(now)
        self._ask_offers(now)
        return self._actions()

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

    def _receive(self, now: float, peer: Hashable, session: Session | None, frame: wire.Frame) -> None:
        kind, meta, request = frame.kind, frame.meta, frame.request
        if kind == wire.JOIN:
            self._join(now, peer, request, meta)
        elif kind == wire.WATCH:
            if self.map.version > int(meta["after"]):
                self._send(peer, wire.MAP, request, self._told())
            else:
                self._watchers.append((peer, request, int(meta["after"])))
        elif kind == wire.DECLARE:
            self._declare(now, peer, request, meta["spec"])
        elif kind == wire.STATUS:
            self._send(peer, wire.REPORT, request, self.status(now))
        elif kind == wire.DRAIN:
            self._drain(now, peer, request, str(meta["server"]))
        elif kind == wire.CHECKPOINT:
            self._begin_checkpoint(now, peer, request, str(meta["path"]))
        elif kind == wire.EXPIRE:
            self._expire(peer, request, meta)
        elif kind == wire.BEAT and session is None:
            other = self.sessions.get(self._peer_of("server", str(meta["server"])))
            if other is not None and other.incarnation == meta["incarnation"]:
                other.heard = now
        elif session is None:
            raise wire.WireError(f"{wire.NAMES.get(kind, kind)} of someone who has not joined")
        elif kind == wire.BEAT:
            if session.role == "server":
                self._send(peer, wire.BEAT, 0, {})
                if meta.get("cut"):
                    self._cut_off(now, session.name, [str(each) for each in meta["cut"]])
                if "report" in meta:
                    self.reports[session.name] = meta["report"]
                if int(meta["version"]) < self.map.version:
                    self._grant(peer)
                self._installed(session, int(meta["version"]))
        elif kind == wire.INSTALLED:
            self._installed(session, int(meta["version"]))
        elif kind == wire.CAUGHTUP:
            shard = int(meta["shard"])
            learner, life = str(meta["learner"]), int(meta["incarnation"])
            known = self.map.servers.get(learner)
            if (
                self._head(session, shard)
                and int(meta["version"]) >= self.map.epochs[shard]
                and learner in self.map.learners[shard]
                and known is not None
                and known.incarnation == life
            ):
                self._caught.setdefault((shard, learner), now)
        elif kind == wire.DRAINED:
            if session.name in self._handing and int(meta["version"]) == self.map.version:
                self._drained |= {shard for shard in meta["shards"] if self._head(session, int(shard))}
        elif kind == wire.LEAVE:
            self._leave(now, peer, request, session)
        elif kind == wire.RETURN:
            self._unreadable(session, int(meta["shard"]), str(meta["why"]), int(meta["version"]))
        elif kind == wire.WRITTEN:
            self._written(session, meta)
        elif kind == wire.DONE:
            if int(meta["of"]) in self._offers:
                self._offered(now, session, int(meta["of"]), meta.get("error"))
            else:
                self._expired(session, int(meta["of"]))
        else:
            raise wire.WireError(f"no {wire.NAMES.get(kind, kind)} is taken here")

    def _head(self, session: Session, shard: int) -> bool:
        return session.role == "server" and self.map.heads[shard] == session.name

    # Maps

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

    # Who is here

    def _join(self, now: float, peer: Hashable, request: int, meta: dict[str, Any]) -> None:
        role, name, life = meta["role"], meta.get("id"), meta.get("incarnation")
        if role not in ("server", "worker") or not isinstance(name, str | None) or not isinstance(life, int | None):
            raise wire.WireError(f"JOIN of {role!r} {name!r} {life!r}")
        if role == "server":
            self._join_server(now, peer, request, name, life, str(meta["address"]), str(meta["host"]))
        else:
            self._join_worker(now, peer, request, name, life)

    def _welcome(self, now: float, peer: Hashable, role: str, name: str, life: int) -> None:
        old = self._peer_of(role, name)
        if old is not None:
            del self.sessions[old]
            self._out.append(Close(PEER, old))
        self.sessions[peer] = Session(role=role, name=name, incarnation=life, heard=now)
        self.absent.pop((role, name), None)

    def _join_server(
        self, now: float, peer: Hashable, request: int, name: str | None, life: int | None, address: str, host: str
    ) -> None:
        seat = self.map.servers.get(name) if name is not None else None
        if life is not None:
            if seat is None and name is not None and self.graves.get(name) == life:
                self._return(now, name, Seat(address=address, host=host, incarnation=life))
                seat = self.map.servers[name]
            if name is None or seat is None or seat.incarnation != life:
                self._refuse(peer, request, "Out", f"{name} in life {life} is not in the map any more; join as new")
                return
            self._welcome(now, peer, "server", name, life)
            self._send(peer, wire.MAP, request, self._told() | {"id": name, "incarnation": life})
            return
        if name is not None and seat is not None:
            if self._peer_of("server", name) is not None:
                self._refuse(peer, request, "Taken", f"a server {name} is here already; give this one another name")
                return
            self._bury(now, [("server", name)])
        self.count += 1
        name = name or f"s{self.count}"
        self.graves.pop(name, None)
        self._welcome(now, peer, "server", name, self.count)
        seat = Seat(address=address, host=host, incarnation=self.count)
        self._calm = now + CALM
        self._publish(servers={**self.map.servers, name: seat})
        self._place()
        self._send(peer, wire.MAP, request, self._told() | {"id": name, "incarnation": self.count})

    def _place(self) -> None:
        """Give shards that nobody ever had their first chains."""
        new = [shard for shard, chain in enumerate(self.map.chains) if not chain and shard not in self.map.lost]
        if not new or len(self.map.servers) < self.expect:
            return
        order = ring(self.map.servers)
        leading = order[: self.settings.get("heads")]
        chains = list(self.map.chains)
        sources = dict(self.map.sources)
        for place, shard in enumerate(new):
            chains[shard] = behind(leading[place % len(leading)], order, self.map.servers, self.replicas)
            if self._restoring is not None:
                sources[shard] = (self._restoring, self.map.version + 1)
        self._restoring = None
        self._publish(chains=tuple(chains), sources=sources)

    def _return(self, now: float, name: str, seat: Seat) -> None:
        """A server that was taken for dead, and has shards of which no other replica lives."""
        mine = [shard for shard, chain in self.map.lost.items() if name in chain]
        chains = list(self.map.chains)
        for shard in mine:
            chains[shard] = (name,)
        del self.graves[name]
        self._calm = now + CALM
        self._out.append(Note("returned", {"server": name, "shards": mine}))
        self._publish(
            servers={**self.map.servers, name: seat},
            chains=tuple(chains),
            lost={shard: chain for shard, chain in self.map.lost.items() if shard not in mine},
        )

    def _join_worker(self, now: float, peer: Hashable, request: int, name: str | None, life: int | None) -> None:
        if life is None:
            self.count += 1
            life = self.count
            name = name or f"w{life}"
        elif name is None or not 0 < life < 1 << 62:
            raise wire.WireError(f"JOIN of worker {name!r} in life {life}: a name and a positive number are expected")
        known = self.map.workers.get(name, 0)
        if self.map.over(life):
            why = f"worker {name} was away for so long that it was given up; start it anew"
            self._refuse(peer, request, "Superseded", why)
            return
        if known > life:
            self._refuse(
                peer, request, "Superseded", f"worker {name} was started again since; this one is its former life"
            )
            return
        self._welcome(now, peer, "worker", name, life)
        self._departed.pop(life, None)
        if 0 < known < life:
            self._departed[known] = now
        if known < life:
            self._publish(workers={**self.map.workers, name: life})
        self._later(peer, request, wire.MAP, {"id": name, "incarnation": life})

    def _leave(self, now: float, peer: Hashable, request: int, session: Session) -> None:
        if session.role == "server":
            self._drain(now, peer, request, session.name)
            return
        del self.sessions[peer]
        if session.name in self.map.workers:
            self._departed[self.map.workers[session.name]] = now
            self._publish(workers={name: life for name, life in self.map.workers.items() if name != session.name})
        self._send(peer, wire.DONE, request, {})

    def _bury(self, now: float, dead: Sequence[tuple[str, str]]) -> None:
        """Members that are gone: chains without them, at once."""
        for key in dead:
            self.absent.pop(key, None)
        servers = {name for role, name in dead if role == "server" and name in self.map.servers}
        workers = {name for role, name in dead if role == "worker" and name in self.map.workers}
        if not servers and not workers:
            return
        chains, learners, lost = list(self.map.chains), list(self.map.learners), dict(self.map.lost)
        for shard, chain in enumerate(chains):
            if servers & {*chain, *learners[shard]}:
                chains[shard] = tuple(name for name in chain if name not in servers)
                learners[shard] = tuple(name for name in learners[shard] if name not in servers)
                # The last replica's learner that caught up lacks nothing that was acknowledged.
                heir = next((name for name in learners[shard] if (shard, name) in self._caught), None)
                if chain and not chains[shard] and heir is not None:
                    chains[shard] = (heir,)
                    learners[shard] = tuple(name for name in learners[shard] if name != heir)
                elif chain and not chains[shard]:
                    lost[shard], learners[shard] = chain, ()
        gone = sorted(set(lost) - set(self.map.lost))
        for name in servers:
            if any(name in lost[shard] for shard in gone):
                self.graves[name] = self.map.servers[name].incarnation
            self.reports.pop(name, None)
            self._handing.pop(name, None)
        self.leaving -= servers
        if servers:
            self._calm = now + CALM
            self._out.append(Note("died", {"servers": sorted(servers), "lost": gone}))
        if workers:
            self._departed |= {self.map.workers[name]: now for name in workers}
            self._out.append(Note("left", {"workers": sorted(workers)}))
        self._publish(
            servers={name: seat for name, seat in self.map.servers.items() if name not in servers},
            chains=tuple(chains),
            learners=tuple(learners),
            lost=lost,
            workers={name: life for name, life in self.map.workers.items() if name not in workers},
        )
        if gone:
            self._lost_since = now
            if self._writing is not None:
                writing, self._writing = self._writing, None
                self._refuse(
                    writing["peer"],
                    writing["request"],
                    "ShardsLost",
                    f"shards {gone[:8]} were lost while it was written",
                )
        self._settle_answers()

    def _revive(self, now: float) -> None:
        """Shards that stayed lost: back to the last checkpoint, loudly."""
        if not self.map.lost or self.checkpoint is None or not self.map.servers or now < self._lost_since + GRACE:
            return
        order = ring(
            {name: seat for name, seat in self.map.servers.items() if name not in self.leaving} or self.map.servers
        )
        chains, sources = list(self.map.chains), dict(self.map.sources)
        for place, shard in enumerate(sorted(self.map.lost)):
            chains[shard] = behind(order[place % len(order)], order, self.map.servers, self.replicas)
            sources[shard] = (self.checkpoint, self.map.version + 1)
        self._out.append(Note("restored", {"shards": sorted(self.map.lost), "checkpoint": self.checkpoint}))
        self.graves.clear()
        revived = self.map.revived | set(self.map.lost)
        self._publish(chains=tuple(chains), sources=sources, lost={}, revived=revived)

    def _unreadable(self, session: Session, shard: int, why: str, version: int) -> None:
        """A shard could not be read out of its checkpoint: it is lost, and that checkpoint is not tried again."""
        if not self._head(session, shard) or version < self.map.epochs[shard]:
            return
        self._out.append(Note("unreadable", {"shard": shard, "checkpoint": self.checkpoint, "why": why}))
        self.checkpoint = None
        chains, learners = list(self.map.chains), list(self.map.learners)
        lost = {**self.map.lost, shard: chains[shard]}
        chains[shard] = learners[shard] = ()
        sources = {each: source for each, source in self.map.sources.items() if each != shard}
        self._publish(chains=tuple(chains), learners=tuple(learners), lost=lost, sources=sources)

    def _cut_off(self, now: float, head: str, servers: Sequence[str]) -> None:
        """A head cannot reach replicas that we can: its chains go on without them, and that pair is not tried again for a while."""
        chains, learners = list(self.map.chains), list(self.map.learners)
        for server in servers:
            if self._peer_of("server", server) is None:
                continue  # its death is seen to otherwise
            self._shunned[head, server] = now + SHUNNED
            for shard, chain in enumerate(chains):
                if chain[:1] == (head,):
                    chains[shard] = tuple(name for name in chain if name != server)
                    learners[shard] = tuple(name for name in learners[shard] if name != server)
        if chains != list(self.map.chains) or learners != list(self.map.learners):
            self._out.append(Note("cut off", {"head": head, "from": list(servers)}))
            self._publish(chains=tuple(chains), learners=tuple(learners))

    def _declare(self, now: float, peer: Hashable, request: int, spec: dict[str, Any]) -> None:
        """First every server says whether it can hold it: what is on the disk must not end whoever reads it there."""
        if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
            raise wire.WireError("DECLARE: a spec with a name is expected")
        offer = next((each for each in self._offers.values() if each.spec["name"] == spec["name"]), None)
        known = next((each for each in self.specs if each["name"] == spec["name"]), offer.spec if offer else None)
        if known is not None and known != spec:
            self._refuse(
                peer,
                request,
                "StoreError",
                f"{spec['name']}: declared as {known}, now as {spec}; use another name, or the same spec in every worker",
            )
        elif offer is not None:
            offer.askers.append((peer, request))
        elif known is not None:
            self._later(peer, request, wire.DONE, {"version": self.map.version, "first": False})
        else:
            self._numbers += 1
            self._offers[self._numbers] = Offer(spec=spec, askers=[(peer, request)])
            self._ask_offers(now)

    def _ask_offers(self, now: float) -> None:
        """Ask servers that have not said yet whether they can hold what is declared; take it where all have."""
        for number, offer in list(self._offers.items()):
            if now >= offer.again:
                offer.again = now + 1.0
                for other, session in self.sessions.items():
                    if session.role == "server" and session.name not in offer.able:
                        self._send(other, wire.DECLARE, 0, {"spec": offer.spec, "of": number})
            if set(self.map.servers) <= offer.able:
                del self._offers[number]
                self.specs = [*self.specs, offer.spec]
                self._publish()
                for place, (peer, request) in enumerate(offer.askers):
                    self._later(peer, request, wire.DONE, {"version": self.map.version, "first": not place})

    def _offered(self, now: float, session: Session, number: int, error: str | None) -> None:
        """A server says whether it can hold what is declared."""
        offer = self._offers[number]
        if error is None:
            offer.able.add(session.name)
            self._ask_offers(now)
            return
        del self._offers[number]
        for peer, request in offer.askers:
            self._refuse(peer, request, "StoreError", f"server {session.name} cannot hold it: {error}")

    # Changes that can wait

    def _elective(self, now: float) -> None:
        if self._take_in(now) or self._hand_over(now) or self._let_go(now):
            return
        if now < self._calm or not self.map.servers:
            return
        wanted = wish(self.map, self.replicas, leaving=self.leaving, heads=self.settings.get("heads"))
        chains, learners = list(self.map.chains), list(self.map.learners)
        hands: dict[str, list[int]] = {}
        waiting: set[str] = set()
        for shard, goal in enumerate(wanted):
            chain = chains[shard]
            if not chain or chain == goal:
                learners[shard] = ()
                continue
            missing = tuple(
                name for name in goal if name not in chain and self._shunned.get((chain[0], name), now) <= now
            )
            if not missing and not set(goal) <= set(chain):
                continue
            if missing:
                waiting.add(chain[0])
                learners[shard] = missing
            elif goal[0] == chain[0]:
                chains[shard], learners[shard] = goal, ()
            else:
                learners[shard] = ()
                hands.setdefault(chain[0], []).append(shard)
        if chains != list(self.map.chains) or learners != list(self.map.learners):
            self._publish(chains=tuple(chains), learners=tuple(learners))
            return
        for head, shards in hands.items():
            # All of a head's at once: each handing over stops reads for a moment.
            if head not in waiting and head not in self._handing:
                self._handing[head] = (now + DRAIN_LIMIT, shards)
                peer = self._peer_of("server", head)
                if peer is not None:
                    self._send(peer, wire.HANDOVER, 0, {"shards": shards})
        self._leavers = [each for each in self._leavers if not self._gone(*each)]

    def _take_in(self, now: float) -> bool:
        """Learners that caught up become replicas."""
        learning = sum(len(each) for each in self.map.learners)
        if not self._caught or (len(self._caught) < learning and now < min(self._caught.values()) + TOGETHER):
            return False
        chains, learners = list(self.map.chains), list(self.map.learners)
        for shard, name in sorted(self._caught):
            chains[shard] = (*chains[shard], name)
            learners[shard] = tuple(each for each in learners[shard] if each != name)
        self._publish(chains=tuple(chains), learners=tuple(learners))
        return True

    def _hand_over(self, now: float) -> bool:
        """Drained shards get the head that they are wished to have."""
        self._handing = {head: each for head, each in self._handing.items() if each[0] > now}
        drained = {shard for shard in self._drained if self.map.heads[shard] in self._handing}
        self._drained = set()
        if not drained:
            return False
        wanted = wish(self.map, self.replicas, leaving=self.leaving, heads=self.settings.get("heads"))
        chains = list(self.map.chains)
        for shard in drained:
            if set(wanted[shard]) <= set(chains[shard]):
                self._handing.pop(chains[shard][0], None)
                chains[shard] = wanted[shard]
        if chains == list(self.map.chains):
            return False
        self._publish(chains=tuple(chains))
        return True

    def _let_go(self, now: float) -> bool:
        """Lives of workers that left long ago: over for ever, so that nobody need know them any more."""
        if now < self._known_since + AWAY_FOR_EVER:
            return False
        recent = {life for life, at in self._departed.items() if now < at + AWAY_FOR_EVER}
        kept = frozenset({*self.map.workers.values(), *recent})
        over = self.count - self.map.horizon + len(self.map.kept) - len(kept)
        if over < FORGOTTEN:
            return False
        self._departed = {life: at for life, at in self._departed.items() if life in recent}
        self._publish(horizon=self.count, kept=kept)
        return True

    def _drain(self, now: float, peer: Hashable, request: int, server: str) -> None:
        if server not in self.map.servers:
            names = ", ".join(sorted(self.map.servers)) or "none"
            self._refuse(peer, request, "ServerError", f"{server}: no server of that name; there are {names}")
            return
        if len(set(self.map.servers) - self.leaving - {server}) < 1:
            self._refuse(
                peer, request, "ServerError", f"{server}: the last server cannot be drained; start another first"
            )
            return
        if server not in self.leaving:
            self.leaving.add(server)
            self._out.append(Persist(self.document()))
        self._leavers.append((server, peer, request))

    def _gone(self, server: str, peer: Hashable, request: int) -> bool:
        """Whether a server that leaves holds nothing any more; it is told so."""
        held = sum(server in chain or server in self.map.learners[shard] for shard, chain in enumerate(self.map.chains))
        if not held:
            self._send(peer, wire.DONE, request, {"server": server})
        return not held

    # Checkpoints and expiry

    def _begin_checkpoint(self, now: float, peer: Hashable, request: int, path: str) -> None:
        if self._writing is not None and self._writing["path"] == path:
            self._writing |= {"peer": peer, "request": request}  # asked again after its connection ended
            return
        if self._writing is not None:
            self._refuse(
                peer, request, "ServerError", f"a checkpoint to {self._writing['path']} is being written; wait for it"
            )
            return
        if self.map.lost or not all(self.map.chains):
            self._refuse(
                peer,
                request,
                "ShardsLost",
                f"shards {sorted(self.map.lost)[:8]} are lost: a checkpoint would lack them",
            )
            return
        self._numbers += 1
        self._writing = {
            "id": self._numbers,
            "path": path,
            "peer": peer,
            "request": request,
            "files": {},
            "asked": -1.0,
        }
        self._ask_checkpoint(now)

    def _ask_checkpoint(self, now: float) -> None:
        """Ask heads for the shards that are not written yet; again after a while, since heads change."""
        writing = self._writing
        if writing is None or now < writing["asked"]:
            return
        writing["asked"] = now + 5.0 if writing["asked"] < 0 else now + 10.0
        wanted: dict[str, list[int]] = {}
        for shard, head in enumerate(self.map.heads):
            if head is not None and shard not in writing["files"]:
                wanted.setdefault(head, []).append(shard)
        for head, shards in wanted.items():
            peer = self._peer_of("server", head)
            if peer is not None:
                self._send(peer, wire.CHECKPOINT, 0, {"id": writing["id"], "path": writing["path"], "shards": shards})

    def _written(self, session: Session, meta: dict[str, Any]) -> None:
        writing = self._writing
        if writing is None or meta["id"] != writing["id"]:
            return
        if "error" in meta:
            self._writing = None
            self._refuse(writing["peer"], writing["request"], "CheckpointError", str(meta["error"]))
            return
        writing["files"][int(meta["shard"])] = {key: meta[key] for key in ("file", "sha256", "bytes", "lsn")}
        if len(writing["files"]) < self.map.shards:
            return
        self._writing = None
        self.checkpoint = writing["path"]
        manifest = {
            "shards": self.map.shards,
            "specs": self.specs,
            "settings": self.settings,
            "count": self.count,
            "files": {str(shard): writing["files"][shard] for shard in sorted(writing["files"])},
        }
        self._out += [Manifest(writing["path"], manifest), Persist(self.document())]
        size = sum(each["bytes"] for each in writing["files"].values())
        self._send(writing["peer"], wire.DONE, writing["request"], {"path": writing["path"], "bytes": size})

    def _expire(self, peer: Hashable, request: int, meta: dict[str, Any]) -> None:
        table, older = str(meta["table"]), int(meta["older"])
        if older < 0:
            self._refuse(peer, request, "ServerError", f"older: {older}; entries of the log are counted from 0")
            return
        if not any(spec["name"] == table and spec.get("what") == "table" for spec in self.specs):
            self._refuse(peer, request, "ServerError", f"{table}: no table of that name is declared")
            return
        self._numbers += 1
        asked = set()
        for other, session in self.sessions.items():
            if session.role == "server":
                asked.add(session.name)
                self._send(other, wire.EXPIRE, 0, {"table": table, "older": older, "of": self._numbers})
        self._expiring[self._numbers] = (peer, request, asked)

    def _expired(self, session: Session, number: int) -> None:
        entry = self._expiring.get(number)
        if entry is None:
            return
        entry[2].discard(session.name)
        if not {name for name in entry[2] if name in self.map.servers}:
            del self._expiring[number]
            self._send(entry[0], wire.DONE, entry[1], {})

    def status(self, now: float) -> dict[str, Any]:
        """What people want to know."""
        known = self.map
        heads = {name: sum(head == name for head in known.heads) for name in known.servers}
        holds = {name: sum(name in chain for chain in known.chains) for name in known.servers}
        return {
            "version": known.version,
            "shards": known.shards,
            "replicas": self.replicas,
            "unplaced": sum(not chain for shard, chain in enumerate(known.chains) if shard not in known.lost),
            "short": sum(
                0 < len(chain) < min(self.replicas, max(1, len(set(known.servers) - self.leaving)))
                for chain in known.chains
            ),
            "learning": sum(bool(each) for each in known.learners),
            "lost": {str(shard): list(chain) for shard, chain in known.lost.items()},
            "restored": {str(shard): list(source) for shard, source in known.sources.items()},
            "revived": sorted(known.revived),
            "checkpoint": self.checkpoint,
            "settings": self.settings,
            "specs": self.specs,
            "workers": {
                name: {"incarnation": life, "here": self._peer_of("worker", name) is not None}
                for name, life in known.workers.items()
            },
            "servers": {
                name: {
                    "address": seat.address,
                    "host": seat.host,
                    "incarnation": seat.incarnation,
                    "heads": heads[name],
                    "replicas": holds[name],
                    "leaving": name in self.leaving,
                    "here": self._peer_of("server", name) is not None,
                    "version": self._version_of(name),
                    **self.reports.get(name, {}),
                }
                for name, seat in known.servers.items()
            },
        }
