"""Changes that can wait: shards go to where they are wished, learners become replicas, heads hand over, old lives are let go."""

from __future__ import annotations

from collections.abc import Hashable

from echelon.server.controller.declarations import Specs
from echelon.server.controller.shard_placement import wish
from echelon.server.protocol import wire
from echelon.server.protocol.actions import Persist

#: A worker that has been away for so long does not come back under its number; forgotten so many at a time.
AWAY_FOR_EVER = 600.0
FORGOTTEN = 64
#: Learners that caught up are taken in all together, or those of so many seconds: each new map and each new kind of chain costs everyone.
TOGETHER = 10.0
DRAIN_LIMIT = 1.5


class Moving(Specs):
    """Each change when every server has the map before it."""

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
