"""How a plan loads one node: ranks, threads, micro-batches. Shared by the forecasts of time and of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.errors import PlanError
from echelon.plan.batch_split import split_batch
from echelon.plan.cluster import Cluster, Device, Node
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile

#: Threads of one rank wait for each other: when another rank has their core the whole rank waits (a judgement, not measured).
_OVERSUBSCRIPTION_PENALTY = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """What the busiest rank of a plan has to do, and beside how many others."""

    device: Device
    node: Node
    ranks: int  #: on this node
    threads: int  #: of each rank
    micro_batch_sizes: tuple[int, ...]  #: samples of each micro-batch
    #: How much longer everything takes because ranks x threads exceed the cores; 1 where they do not.
    oversubscription: float

    @property
    def samples(self) -> int:
        """Samples of this rank in one step."""
        return sum(self.micro_batch_sizes)

    @property
    def largest_micro_batch(self) -> int:
        """Samples of the largest micro-batch: it decides the memory."""
        return max(self.micro_batch_sizes)

    @property
    def capacity(self) -> float:
        """Bytes that one rank may use."""
        if self.device.kind == "cpu":
            return self.node.memory * 0.95 / self.ranks  # the system and the launcher need some too
        return float(min(device.memory for device in self.node.devices))


def require_uniform_node(cluster: Cluster) -> None:
    """Between nodes no link is known, and unequal devices wait for the slowest: priced by the first they would be flattered."""
    if len(cluster.nodes) > 1:
        raise PlanError(
            f"{cluster.name}: a cluster of {len(cluster.nodes)} nodes cannot be forecast, because no link between nodes is "
            "described; give a cluster of one node"
        )
    first, *others = (replace(device, memory=0) for device in cluster.nodes[0].devices)
    for index, device in enumerate(others, 1):
        if device != first:
            raise PlanError(
                f"{cluster.nodes[0].name}: device {index} ({device.name}) is not like device 0 ({first.name}), and a step "
                "over unequal devices cannot be forecast; leave one kind of them out (CUDA_VISIBLE_DEVICES)"
            )


def compute_node_load(profile: Profile, cluster: Cluster, plan: Plan) -> NodeLoad:
    """The load that `plan` puts on the cluster's node."""
    node, ranks = cluster.nodes[0], plan.ranks
    threads = plan.threads or max(node.cores // ranks, 1)
    requested_threads = ranks * threads
    oversubscription = 1.0
    if cluster.device_kind == "cpu" and requested_threads > node.cores:
        oversubscription = requested_threads / node.cores * (_OVERSUBSCRIPTION_PENALTY if threads > 1 else 1.0)
    micro_batches_by_rank = split_batch(profile.batch, plan.mesh.dp, plan.micro, plan.data.batch_shares)
    largest_share = max(
        micro_batches_by_rank, key=lambda rank_micro_batches: rank_micro_batches[-1].stop - rank_micro_batches[0].start
    )
    return NodeLoad(
        device=node.devices[0],
        node=node,
        ranks=ranks,
        threads=threads,
        micro_batch_sizes=tuple(micro_batch.size for micro_batch in largest_share),
        oversubscription=oversubscription,
    )
