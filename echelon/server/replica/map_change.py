"""A new map: what we hold, head and follow from now on, to whom we need links, who waits for whom, what comes out of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from echelon.errors import EchelonError, ServerError
from echelon.server.protocol import wire
from echelon.server.protocol.actions import LINK, Action, Close, Note
from echelon.server.protocol.shard_map import Map
from echelon.server.replica.backup import Following
from echelon.server.replica.replica_link import Link, Waiting
from echelon.server.replica.state import MALFORMED


class Maps(Following):
    """Changes of the map."""

    def _adopt(self, now: float, new: Map, specs: Sequence[dict[str, Any]]) -> bool:
        """Be what a newer map makes of us; False: it does not concern us."""
        old = self.map
        if new.version <= old.version:
            return False
        seat = new.servers.get(self.name)
        if seat is None or seat.incarnation != self.incarnation:
            # Taken for dead. Whether what we hold is worth anything the controller says, not whoever passes its map on: a later
            # version may have us back, with shards that nobody else has.
            return False
        if new.shards != old.shards:
            raise wire.WireError(f"a map of {new.shards} shards where there are {old.shards}")
        for spec in specs[len(self.specs) :]:
            if self._declare is not None:
                self._declare(spec)
        self.map, self.specs = new, list(specs)
        self._taking, self._epochs = {}, np.array(new.epochs, np.int64)
        held = new.held_by(self.name)
        before = old.held_by(self.name)
        for shard in np.flatnonzero(before & ~held):
            self.state.drop(int(shard))
            self._arriving.pop(int(shard), None)
        self._restore(held)
        self.headed = new.headed_by(self.name)
        several = len(new.servers) > 1
        self._single = np.fromiter((several and len(chain) == 1 for chain in new.chains), bool, new.shards)
        changed = np.fromiter((epoch > old.version for epoch in new.epochs), bool, new.shards)
        for shard in np.flatnonzero(changed & self.headed):
            former = old.heads[shard]
            answered = self._answered.get(former, -np.inf) if former is not None and former != self.name else -np.inf
            self._reads_from[shard] = answered + self.lease
        self._reads_all_from = float(self._reads_from.max())
        self.draining &= self.headed & ~changed
        self._drains = [each for each in self._drains if self.draining[each[1]].all()]
        self._relink(now, new, changed)
        self._live = [self.state.windows.slot(worker, incarnation) for worker, incarnation in new.workers.items()]
        self._floor = None
        self._readiness()
        self._rewait()
        self._tell(wire.INSTALLED, {"version": new.version})
        for link in self.links.values():
            self._ask(link)
        return True

    def _relink(self, now: float, new: Map, changed: np.ndarray) -> None:
        wanted: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for shard in np.flatnonzero(self.headed):
            for place, servers in enumerate((new.chains[shard][1:], new.learners[shard])):
                for server in servers:
                    if server not in wanted:
                        wanted[server] = (np.zeros(new.shards, bool), np.zeros(new.shards, bool))
                    wanted[server][place][shard] = True
        for server in [each for each in self.links if each not in wanted]:
            self._drop_link(server)
        for server, (backup, learner) in wanted.items():
            incarnation = new.servers[server].incarnation
            if server in self.links and self.links[server].incarnation != incarnation:
                self._drop_link(server)
            if server not in self.links:
                self._fresh_link(now, server, incarnation)
            link = self.links[server]
            again = link.refused & (backup | learner)
            link.forget(changed | again | ~(backup | learner))
            link.backup, link.learner = backup, learner
            link.required &= learner
            link.asked[:] = False

    def _fresh_link(self, now: float, server: str, incarnation: int) -> None:
        self._links_made += 1
        self.links[server] = Link(server, incarnation, self.map.shards, self._links_made)
        self.links[server].down = now

    def _drop_link(self, server: str) -> None:
        link = self.links.pop(server)
        for _, waiting in link.waiting:
            waiting.needs.pop(server, None)
            if not waiting.needs and waiting not in self._parked:
                self._parked.append(waiting)
        self._out.append(Close(LINK, server))

    def _rewait(self) -> None:
        """Who waits for whom, under a new map."""
        everyone: dict[int, Waiting] = {id(waiting): waiting for waiting in self._parked}
        for link in self.links.values():
            everyone |= {id(waiting): waiting for _, waiting in link.waiting}
        gone = set()
        for key, waiting in everyone.items():
            if not self.headed[waiting.cover.at].all():
                gone.add(key)
                if waiting.peer is not None:
                    self._send(waiting.peer, wire.STALE, waiting.request, {"version": self.map.version})
                continue
            for server in list(waiting.needs):
                if not self.links[server].needed(waiting.cover):
                    del waiting.needs[server]
        for link in self.links.values():
            link.waiting = type(link.waiting)(
                each for each in link.waiting if id(each[1]) not in gone and link.server in each[1].needs
            )
        self._parked = []
        for key, waiting in everyone.items():
            if key not in gone and not waiting.needs:
                self._settle(waiting)

    def _restore(self, held: np.ndarray) -> None:
        """Which shards the map orders out of a checkpoint, and we do not have from it yet."""
        self.loading = {
            shard: (folder, version)
            for shard, (folder, version) in self.map.sources.items()
            if held[shard] and self.name in self.map.chains[shard] and self.state.stamp[shard] < version
        }
        self._taking.clear()
        self._unloaded[:] = False
        self._unloaded[list(self.loading)] = True

    def on_load(self, now: float) -> list[Action]:
        """Read the next shard that is to come out of a checkpoint (`loading`); one at a time, as each may take a while."""
        if not self.loading:
            return []
        shard, (folder, version) = next(iter(self.loading.items()))
        del self.loading[shard]
        self._taking.clear()
        self._unloaded[shard] = False
        try:
            if self._load is None:
                raise ServerError("nothing here can read checkpoints")
            self.state.install(shard, self._load(folder, shard))
            self.state.stamp[shard] = version
            if shard in self.map.revived:
                self.state.windows.restore(shard)
        except (EchelonError, OSError, *MALFORMED) as error:
            # A backup gets it from its head; without the head's the shard stays lost. The others here are as good as before.
            self.state.drop(shard)
            self._out.append(Note("unreadable", {"shard": shard, "folder": folder, "why": str(error)}))
            if self.headed[shard]:
                self._unloaded[shard] = True
                self._tell(wire.RETURN, {"shard": shard, "why": str(error), "version": self.map.version})
        self._floor = None
        self._readiness()
        for link in self.links.values():
            self._ask(link)
        self._enrol(now)
        self._commit(now)
        self._again(now)
        return self._actions()
