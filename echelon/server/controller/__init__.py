"""The controller, without sockets and without a clock: it alone writes the map, and writes it to the disk before anyone sees it.

It notices deaths, shortens chains, gives shards new replicas and moves them to where they are wished, counts workers in and out, keeps
what is declared. Everything durable is in one document; everything else is learnt again after a restart. While it is down nothing
changes and nothing stops.

What it must not do: make a shard's chain of anyone who may lack something acknowledged. Chains only lose members (the rest have
everything), or gain a learner of which the head said, after everything it had been sent was answered, that it has caught up. A change
that nobody's death forces waits until every server has the present map, so that none of them ever misses one that matters to it.

Its rooms, each of which knows only those before it: `ground` (what all share), `checkpoints`, `specs` (what is declared), `moving` (changes that can
wait), `members` (who is here, and what a death changes at once), and here what comes in and goes where.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from echelon.errors import EchelonError
from echelon.server.controller.members import CALM, Members
from echelon.server.controller.state import GRACE, SERVER_LEASE, Session
from echelon.server.protocol import wire
from echelon.server.protocol.actions import PEER, Action, Close, Note
from echelon.server.replica import MALFORMED

#: A connection that ended may be made again; a process that was killed does not come back.
RECONNECT = 0.2
WORKER_LEASE = 2.0
WORKER_RECONNECT = 1.0
#: A controller that did not get round to its ticks for so long judges nobody by what it did not hear.
AWAY = 0.3


class Controller(Members):
    """The state machine. `document` is what a former life persisted, or None."""

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
        self._ask_expiring()
        return self._actions()

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
            if "server" not in meta:
                return  # a worker's that crossed our answer to its leaving
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
            self._written(meta)
        elif kind == wire.DONE:
            if int(meta["of"]) in self._offers:
                self._offered(now, session, int(meta["of"]), meta.get("error"))
            else:
                self._expired(session, int(meta["of"]))
        else:
            raise wire.WireError(f"no {wire.NAMES.get(kind, kind)} is taken here")

    def status(self, now: float) -> dict[str, Any]:
        """What people want to know."""
        known = self.map
        heads = {name: sum(head == name for head in known.heads) for name in known.servers}
        lengths = [len(chain) for chain in known.chains]
        holds = {name: sum(name in chain for chain in known.chains) for name in known.servers}
        return {
            "version": known.version,
            "shards": known.shards,
            "replicas": self.replicas,
            "unplaced": sum(not chain for shard, chain in enumerate(known.chains) if shard not in known.lost),
            "short": sum(0 < len(chain) < self.replicas for chain in known.chains),
            # Of those, the ones that the servers there are could hold.
            "owed": sum(
                0 < len(chain) < min(self.replicas, max(1, len(set(known.servers) - self.leaving)))
                for chain in known.chains
            ),
            "shards_by_replicas": {str(count): lengths.count(count) for count in sorted(set(lengths))},
            "unreadable": self.unreadable,
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


__all__ = ["CALM", "GRACE", "RECONNECT", "SERVER_LEASE", "WORKER_LEASE", "Controller"]
