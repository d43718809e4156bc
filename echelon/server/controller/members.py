"""Who is here: servers and workers that join, leave, die, come back; and what becomes of a dead server's shards, at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from echelon.server.controller.rebalance import Moving
from echelon.server.controller.shard_placement import behind, ring
from echelon.server.controller.state import GRACE, Session
from echelon.server.protocol import wire
from echelon.server.protocol.actions import PEER, Close, Note
from echelon.server.protocol.shard_map import Seat

#: Membership is left to settle before shards are moved for it.
CALM = 0.3
#: A head and a replica that cannot reach each other are not paired again for so long.
SHUNNED = 10.0


class Members(Moving):
    """Membership."""

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
        if life > self.count:
            why = f"worker {name} in life {life}: this controller has given {self.count} lives only, it began anew; start the worker anew"
            self._refuse(peer, request, "Superseded", why)
            return
        if self.map.over(life):
            why = f"worker {name} was away for so long that it was given up; start it anew"
            self._refuse(peer, request, "Superseded", why)
            return
        if known > life:
            self._refuse(
                peer,
                request,
                "Superseded",
                f"worker {name} was started again since, or another has its name; this one is its former life. Give each worker a name of its own (worker=)",
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
                here = (name for name in learners[shard] if self._peer_of("server", name) is not None)
                heir = next((name for name in here if (shard, name) in self._caught), None)
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
            self._lack(gone)
        self._settle_answers()

    def _revive(self, now: float) -> None:
        """Shards that stayed lost: back to the last checkpoint, loudly."""
        if not self.map.lost or self.checkpoint is None or not self.map.servers or now < self._lost_since + GRACE:
            return
        order = ring(
            {name: seat for name, seat in self.map.servers.items() if name not in self.leaving} or self.map.servers
        )
        heading = [name for name in order if name in self.map.heads]
        leading = [*heading, *(name for name in order if name not in heading)][: self.settings.get("heads")]
        chains, sources = list(self.map.chains), dict(self.map.sources)
        for place, shard in enumerate(sorted(self.map.lost)):
            chains[shard] = behind(leading[place % len(leading)], order, self.map.servers, self.replicas)
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
        self.checkpoint, self.unreadable = None, why
        chains, learners = list(self.map.chains), list(self.map.learners)
        lost = {**self.map.lost, shard: chains[shard]}
        chains[shard] = learners[shard] = ()
        sources = {each: source for each, source in self.map.sources.items() if each != shard}
        self._publish(chains=tuple(chains), learners=tuple(learners), lost=lost, sources=sources)
        self._lack([shard])

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
