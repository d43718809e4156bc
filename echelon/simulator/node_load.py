"""How a plan loads one node: ranks, threads, micro-batches. Shared by the forecasts of time and of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.errors import PlanError
from echelon.plan.batch_split import split
from echelon.plan.cluster import Cluster, Device, Node
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile

#: Threads of one rank wait for each other: when another rank has their core the whole rank waits (a judgement, not measured).
_CROWDING = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the busiest rank of a plan has to do, and beside how many others."""

    device: Device
    node: Node
    ranks: int  #: on this node
    threads: int  #: of each rank
    micros: tuple[int, ...]  #: samples of each micro-batch
    #: How much longer everything takes because ranks x threads exceed the cores; 1 where they do not.
    crowding: float

    @property
    def samples(self) -> int:
        """Samples of this rank in one step."""
        return sum(self.micros)

    @property
    def largest(self) -> int:
        """Samples of the largest micro-batch: it decides the memory."""
        return max(self.micros)

    @property
    def capacity(self) -> float:
        """Bytes that one rank may use."""
        if self.device.kind == "cpu":
            return self.node.memory * 0.95 / self.ranks  # the system and the launcher need some too
        return float(min(device.memory for device in self.node.devices))


def require_one_kind(cluster: Cluster) -> None:
    """Between nodes no link is known, and unequal devices wait for the slowest: priced by the first they would be flattered."""
    if len(cluster.nodes) > 1:
        raise PlanError(
            f"{cluster.name}: a cluster of {len(cluster.nodes)} nodes cannot be forecast, because no link between nodes is "
            "described; give a cluster of one node"
        )
    first, *others = (replace(device, memory=0) for device in cluster.nodes[0].devices)
    for number, device in enumerate(others, 1):
        if device != first:
            raise PlanError(
                f"{cluster.nodes[0].name}: device {number} ({device.name}) is not like device 0 ({first.name}), and a step "
                "over unequal devices cannot be forecast; leave one kind of them out (CUDA_VISIBLE_DEVICES)"
            )


def load_of(profile: Profile, cluster: Cluster, plan: Plan) -> Load:
    """The load that `plan` puts on the cluster's node."""
    node, ranks = cluster.nodes[0], plan.ranks
    threads = plan.threads or max(node.cores // ranks, 1)
    asked = ranks * threads
    crowding = 1.0
    if cluster.kind == "cpu" and asked > node.cores:
        crowding = asked / node.cores * (_CROWDING if threads > 1 else 1.0)
    shares = split(profile.batch, plan.mesh.dp, plan.micro, plan.shares)
    most = max(shares, key=lambda share: share[-1].stop - share[0].start)
    return Load(
        device=node.devices[0],
        node=node,
        ranks=ranks,
        threads=threads,
        micros=tuple(part.size for part in most),
        crowding=crowding,
    )
