"""What must hold: in every state, when a head acknowledges, and at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.server.protocol.actions import Send
from echelon.server.protocol.shard_map import ShardMap

if TYPE_CHECKING:
    from tests.server.model.world import World


def check(world: World) -> None:
    """The invariants of every state."""
    case = world.case
    for name in world.servers():
        replica = world.nodes[name].replica
        if replica is None:
            continue
        state = replica.shards
        for shard in range(case.shards):
            want = 0
            held = sum(
                int(entry.frame.arrays[2][0, 0])
                for each in state.pending_pushes.values()
                for entry in each
                if shard in entry.shards
            )
            for (worker, _), slot in state.dedup.slots.items():
                first = int(worker[1:]) * case.pushes
                want += sum(8 ** (first + number) for number in range(int(state.dedup.last_seq[slot, shard])))
            if state.store.rows[shard] + held != want:
                world.fail(
                    f"{name} has {oct(int(state.store.rows[shard]))} on shard {shard} where its windows say {oct(want)}"
                )
    if world.disk is None:
        return
    known = ShardMap.from_document(world.disk["map"])
    for (worker, shard), seq in world.acked.items():
        for name in known.chains[shard]:
            node = world.nodes.get(name)
            if node is None or node.replica is None or node.incarnation != known.servers[name].incarnation:
                continue
            slot = node.replica.shards.dedup.slots.get((worker, world.nodes[worker].incarnation))
            have = 0 if slot is None else int(node.replica.shards.dedup.last_seq[slot, shard])
            if have < seq:
                world.fail(
                    f"{name}, of the chain of shard {shard}, has {have} pushes of {worker}; {seq} are acknowledged"
                )


def acknowledged(world: World, head: str, worker: str, action: Send) -> None:
    """A head acknowledges a push: it may, and from now on nobody may lose it."""
    section = world.nodes[worker].flying.get(action.request_id)
    if section is None:
        return
    replica = world.nodes[head].replica
    for shard in section.shards.tolist():
        key = (worker, shard)
        epoch = replica.map.epochs[shard]
        # A former head may be late in saying what all replicas had before it was replaced; it may not add to that.
        if epoch < world.epochs.get(shard, 0) and not _known(world, worker, shard, section.seq):
            world.fail(f"{head} acknowledges on shard {shard} in epoch {epoch} after epoch {world.epochs[shard]} did")
        world.epochs[shard] = max(epoch, world.epochs.get(shard, 0))
        world.acked[key] = max(world.acked.get(key, 0), section.seq)


def _known(world: World, worker: str, shard: int, seq: int) -> bool:
    """Whether the shard's present head has a push."""
    assert world.disk is not None
    known = ShardMap.from_document(world.disk["map"])
    node = world.nodes.get(known.heads[shard] or "")
    if node is None or node.replica is None:
        return True
    slot = node.replica.shards.dedup.slots.get((worker, world.nodes[worker].incarnation))
    return slot is not None and int(node.replica.shards.dedup.last_seq[slot, shard]) >= seq


def finished(world: World) -> None:
    """What must hold when everything came to its end."""
    core = world.nodes["controller"]
    if core.map.lost_shards:
        return
    for name in world.workers():
        worker = world.nodes[name]
        if worker.left or len(worker.outbox):
            world.fail(f"{name} ends with {worker.left} pushes to make and {len(worker.outbox)} unanswered")
    places = world.case.workers * world.case.pushes
    whole = sum(8**place for place in range(places))
    for shard, chain in enumerate(core.map.chains):
        digests = set()
        for name in chain:
            state = world.nodes[name].replica.shards
            digests.add(state.digest(shard))
            if state.store.rows[shard] != whole:
                world.fail(f"{name} ends with {oct(int(state.store.rows[shard]))} on shard {shard}, not {oct(whole)}")
        if len(digests) > 1:
            world.fail(f"replicas of shard {shard} on {chain} are not equal at the end")
