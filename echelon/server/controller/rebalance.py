"""Changes that can wait: shards move to their target chains, learners join chains, heads hand over, old incarnations expire.

Each change waits until every server has the map before it, so that no server misses a map that concerns it.
"""

from __future__ import annotations

from collections.abc import Hashable

from echelon.errors import ServerError
from echelon.server.controller.shard_placement import compute_target_chains
from echelon.server.controller.state import Chain, ControllerState, Requester, Session
from echelon.server.protocol import wire

#: A worker expires after this absence; expired incarnations are dropped from the map in batches.
WORKER_RETENTION = 600.0
FORGET_BATCH_SIZE = 64
#: How long learners that caught up wait for the others: each new map, and each new kind of chain, costs everyone.
LEARNER_BATCH_DELAY = 10.0
DRAIN_TIMEOUT = 1.5


def rebalance(controller: ControllerState, now: float) -> None:
    """Take the next step towards the target chains."""
    if promote_learners(controller, now) or complete_handovers(controller, now) or expire_workers(controller, now):
        return
    if now < controller.rebalance_after or not controller.map.servers:
        return
    chains, learners = list(controller.map.chains), list(controller.map.learners)
    shards_to_hand_over: dict[str, list[int]] = {}
    heads_with_learners: set[str] = set()
    avoided = {pair for pair, until in controller.avoided_until.items() if until > now}
    for shard, target in enumerate(_target_chains(controller)):
        chain = chains[shard]
        if not chain or chain == target:
            learners[shard] = ()
        elif missing := tuple(name for name in target if name not in chain and (chain[0], name) not in avoided):
            heads_with_learners.add(chain[0])
            learners[shard] = missing
        elif set(target) <= set(chain):
            learners[shard] = ()
            if target[0] == chain[0]:
                chains[shard] = target
            else:
                shards_to_hand_over.setdefault(chain[0], []).append(shard)
    if controller.publish_chains(chains, learners):
        return
    for head, shards in shards_to_hand_over.items():
        # All of a head's shards at once: each handover stops pushes for a moment.
        if head not in heads_with_learners and head not in controller.handovers:
            controller.handovers[head] = (now + DRAIN_TIMEOUT, shards)
            controller.send_to_server(head, wire.HANDOVER, {"shards": shards})
    used_servers = {name for names in (*controller.map.chains, *controller.map.learners) for name in names}
    for server, (peer, request_id) in controller.drain_requests:
        if server not in used_servers:
            controller.send(peer, wire.DONE, request_id, {"server": server})
    controller.drain_requests = [request for request in controller.drain_requests if request[0] in used_servers]


def _target_chains(controller: ControllerState) -> list[Chain]:
    max_heads = controller.settings.get("heads")
    return compute_target_chains(controller.map, controller.replicas, leaving=controller.leaving, max_heads=max_heads)


def promote_learners(controller: ControllerState, now: float) -> bool:
    """Add the learners that caught up to their chains, all of them together if they come soon enough."""
    caught_up, num_learners = controller.caught_up, sum(len(learners) for learners in controller.map.learners)
    if not caught_up or (len(caught_up) < num_learners and now < min(caught_up.values()) + LEARNER_BATCH_DELAY):
        return False
    chains, learners = list(controller.map.chains), list(controller.map.learners)
    for shard, learner in sorted(caught_up):
        chains[shard] += (learner,)
        learners[shard] = tuple(name for name in learners[shard] if name != learner)
    return controller.publish_chains(chains, learners)


def on_caught_up(controller: ControllerState, now: float, session: Session, frame: wire.Frame) -> None:
    """CAUGHT_UP: a learner's acknowledgement is required from now on, and it lacks nothing."""
    meta, shard_map = frame.meta, controller.map
    shard, learner, incarnation = int(meta["shard"]), str(meta["learner"]), int(meta["incarnation"])
    is_current = controller.is_head(session, shard) and int(meta["version"]) >= shard_map.epochs[shard]
    if is_current and learner in shard_map.learners[shard] and (learner, incarnation) in controller.live_servers():
        controller.caught_up.setdefault((shard, learner), now)


def on_drained(controller: ControllerState, now: float, session: Session, frame: wire.Frame) -> None:
    """DRAINED: a head that hands over has answered everything on these shards."""
    if session.name in controller.handovers and int(frame.meta["version"]) == controller.map.version:
        shards = frame.meta["shards"]
        controller.drained_shards |= {shard for shard in shards if controller.is_head(session, int(shard))}


def complete_handovers(controller: ControllerState, now: float) -> bool:
    controller.handovers = {head: handover for head, handover in controller.handovers.items() if handover[0] > now}
    drained = {shard for shard in controller.drained_shards if controller.map.heads[shard] in controller.handovers}
    controller.drained_shards = set()
    if not drained:
        return False
    target_chains, chains = _target_chains(controller), list(controller.map.chains)
    for shard in drained:
        if set(target_chains[shard]) <= set(chains[shard]):
            controller.handovers.pop(chains[shard][0], None)
            chains[shard] = target_chains[shard]
    return controller.publish_chains(chains, controller.map.learners)


def expire_workers(controller: ControllerState, now: float) -> bool:
    """Drop the incarnations of workers that left long ago: no server need remember them."""
    if now < controller.started_at + WORKER_RETENTION:
        return False
    recent = {number: left_at for number, left_at in controller.departed_at.items() if now < left_at + WORKER_RETENTION}
    shard_map, last_incarnation = controller.map, controller.last_incarnation
    retained = frozenset({*shard_map.workers.values(), *recent})
    num_expired = last_incarnation - shard_map.horizon + len(shard_map.retained_incarnations) - len(retained)
    if num_expired < FORGET_BATCH_SIZE:
        return False
    controller.departed_at = recent
    controller.publish_map(horizon=last_incarnation, retained_incarnations=retained)
    return True


def on_drain(controller: ControllerState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    """DRAIN: an administrator takes a server out."""
    begin_drain(controller, (peer, frame.request_id), str(frame.meta["server"]))


def begin_drain(controller: ControllerState, requester: Requester, server: str) -> None:
    """Move everything off a server; answer when it holds nothing."""
    if server not in controller.map.servers:
        names = ", ".join(sorted(controller.map.servers)) or "none"
        raise ServerError(f"{server}: no server of that name; there are {names}")
    if not set(controller.map.servers) - controller.leaving - {server}:
        raise ServerError(f"{server}: the last server cannot be drained; start another first")
    if server not in controller.leaving:
        controller.leaving.add(server)
        controller.persist()
    controller.drain_requests.append((server, requester))
