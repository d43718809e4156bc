"""Changes that can wait: shards go to where they are wished, learners become replicas, heads hand over, old lives are let go."""

from __future__ import annotations

from collections.abc import Hashable

from echelon.server.controller.declarations import Declarations
from echelon.server.controller.shard_placement import compute_target_chains
from echelon.server.protocol import wire
from echelon.server.protocol.actions import Persist

#: A worker that has been away for so long does not come back under its number; forgotten so many at a time.
WORKER_RETENTION = 600.0
FORGET_BATCH_SIZE = 64
#: Learners that caught up are taken in all together, or those of so many seconds: each new map and each new kind of chain costs everyone.
LEARNER_BATCH_DELAY = 10.0
DRAIN_TIMEOUT = 1.5


class Rebalancing(Declarations):
    """Each change when every server has the map before it."""

    def _rebalance(self, now: float) -> None:
        if self._promote_learners(now) or self._complete_handovers(now) or self._forget_departed_workers(now):
            return
        if now < self._rebalance_after or not self.map.servers:
            return
        target_chains = compute_target_chains(
            self.map, self.replicas, leaving=self.leaving, max_heads=self.settings.get("heads")
        )
        chains, learners = list(self.map.chains), list(self.map.learners)
        shards_to_hand_over: dict[str, list[int]] = {}
        heads_with_learners: set[str] = set()
        for shard, target in enumerate(target_chains):
            chain = chains[shard]
            if not chain or chain == target:
                learners[shard] = ()
                continue
            missing = tuple(
                name for name in target if name not in chain and self._avoided_until.get((chain[0], name), now) <= now
            )
            if not missing and not set(target) <= set(chain):
                continue
            if missing:
                heads_with_learners.add(chain[0])
                learners[shard] = missing
            elif target[0] == chain[0]:
                chains[shard], learners[shard] = target, ()
            else:
                learners[shard] = ()
                shards_to_hand_over.setdefault(chain[0], []).append(shard)
        if chains != list(self.map.chains) or learners != list(self.map.learners):
            self._publish_map(chains=tuple(chains), learners=tuple(learners))
            return
        for head, shards in shards_to_hand_over.items():
            # All of a head's at once: each handing over stops reads for a moment.
            if head not in heads_with_learners and head not in self._handovers:
                self._handovers[head] = (now + DRAIN_TIMEOUT, shards)
                peer = self._find_peer("server", head)
                if peer is not None:
                    self._send(peer, wire.HANDOVER, 0, {"shards": shards})
        self._drain_requests = [request for request in self._drain_requests if not self._complete_drain(*request)]

    def _promote_learners(self, now: float) -> bool:
        """Learners that caught up become replicas."""
        learner_count = sum(len(item) for item in self.map.learners)
        if not self._caught_up or (
            len(self._caught_up) < learner_count and now < min(self._caught_up.values()) + LEARNER_BATCH_DELAY
        ):
            return False
        chains, learners = list(self.map.chains), list(self.map.learners)
        for shard, name in sorted(self._caught_up):
            chains[shard] = (*chains[shard], name)
            learners[shard] = tuple(item for item in learners[shard] if item != name)
        self._publish_map(chains=tuple(chains), learners=tuple(learners))
        return True

    def _complete_handovers(self, now: float) -> bool:
        """Drained shards get the head that they are wished to have."""
        self._handovers = {head: handover for head, handover in self._handovers.items() if handover[0] > now}
        drained = {shard for shard in self._drained_shards if self.map.heads[shard] in self._handovers}
        self._drained_shards = set()
        if not drained:
            return False
        target_chains = compute_target_chains(
            self.map, self.replicas, leaving=self.leaving, max_heads=self.settings.get("heads")
        )
        chains = list(self.map.chains)
        for shard in drained:
            if set(target_chains[shard]) <= set(chains[shard]):
                self._handovers.pop(chains[shard][0], None)
                chains[shard] = target_chains[shard]
        if chains == list(self.map.chains):
            return False
        self._publish_map(chains=tuple(chains))
        return True

    def _forget_departed_workers(self, now: float) -> bool:
        """Lives of workers that left long ago: over for ever, so that nobody need know them any more."""
        if now < self._departures_known_since + WORKER_RETENTION:
            return False
        recent = {
            incarnation
            for incarnation, departed_at in self._departed_at.items()
            if now < departed_at + WORKER_RETENTION
        }
        retained = frozenset({*self.map.workers.values(), *recent})
        expired_count = self.last_incarnation - self.map.horizon + len(self.map.retained_incarnations) - len(retained)
        if expired_count < FORGET_BATCH_SIZE:
            return False
        self._departed_at = {
            incarnation: departed_at for incarnation, departed_at in self._departed_at.items() if incarnation in recent
        }
        self._publish_map(horizon=self.last_incarnation, retained_incarnations=retained)
        return True

    def _begin_drain(self, now: float, peer: Hashable, request_id: int, server: str) -> None:
        if server not in self.map.servers:
            names = ", ".join(sorted(self.map.servers)) or "none"
            self._refuse(peer, request_id, "ServerError", f"{server}: no server of that name; there are {names}")
            return
        if len(set(self.map.servers) - self.leaving - {server}) < 1:
            self._refuse(
                peer, request_id, "ServerError", f"{server}: the last server cannot be drained; start another first"
            )
            return
        if server not in self.leaving:
            self.leaving.add(server)
            self._queued_actions.append(Persist(self.to_document()))
        self._drain_requests.append((server, peer, request_id))

    def _complete_drain(self, server: str, peer: Hashable, request_id: int) -> bool:
        """Whether a server that leaves holds nothing any more; it is told so."""
        shard_count = sum(
            server in chain or server in self.map.learners[shard] for shard, chain in enumerate(self.map.chains)
        )
        if not shard_count:
            self._send(peer, wire.DONE, request_id, {"server": server})
        return not shard_count
