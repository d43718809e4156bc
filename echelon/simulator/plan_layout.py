"""A plan laid out on a cluster that is known by its data sheets: what each rank of the pipeline has, before anything is priced."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.errors import PlanError
from echelon.plan.batch_split import largest_share, rounds
from echelon.plan.cluster import Cluster, Sheet
from echelon.plan.plan import Plan
from echelon.plan.stages import divide, stage_count, stage_ranges
from echelon.simulator import pipeline_order
from echelon.simulator.model_summary import Work, recast
from echelon.simulator.pipeline_schedule import runs_as
from echelon.simulator.training_stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Nothing here depends on fitted constants."""

    work: Work
    sheet: Sheet
    plan: Plan
    stack: Stack
    batch: int
    micro: int
    count: int  #: micro-batches
    schedule: str  #: as so many micro-batches are run
    stages: tuple[float, ...]  #: what each stage computes, in blocks; stage `n` is on rank `n % pp`
    sizes: tuple[float, ...]  #: parameters of blocks that each stage holds, in blocks
    crossing: tuple[float, ...]  #: bytes per sample that each stage gets from the one before
    capacity: float
    nodes: int
    here: tuple[int, ...]  #: ranks of pp that are on devices of this kind

    @property
    def chunks(self) -> int:
        """Stages of one rank of pp."""
        return len(self.stages) // self.plan.mesh.pp

    @property
    def samples(self) -> float:
        """Samples of a micro-batch as one rank computes them: cp parts each."""
        return self.micro / self.plan.mesh.cp

    @property
    def data(self) -> int:
        """Ranks that have the same parameters and other samples, or other parts of them."""
        return self.plan.mesh.dp * self.plan.mesh.cp

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO divides."""
        return min(self.stack.scope or self.data, self.data)

    @property
    def along(self) -> int:
        """Parts into which what tp does not cut is divided."""
        return self.plan.mesh.tp if self.plan.sequence else 1

    @property
    def gradient(self) -> float:
        """Bytes of one number of the gradients that are kept between micro-batches."""
        return self.stack.gradients or self.work.width

    @property
    def message(self) -> float:
        """Bytes of one number of the gradients in messages."""
        return self.stack.message or self.work.width

    @property
    def master(self) -> bool:
        """Whether there is a wide copy of the parameters."""
        return self.stack.master and self.work.width < 4

    @property
    def state(self) -> float:
        """Bytes that the optimizer holds for one parameter: a wide copy has wide states."""
        return self.work.state * (4 / self.work.width) + 4 if self.master else self.work.state

    def last(self, rank: int) -> bool:
        """Whether a rank of pp computes the loss."""
        return rank == (len(self.stages) - 1) % self.plan.mesh.pp

    def outside(self, rank: int) -> float:
        """Parameters outside of blocks on a rank of pp."""
        work, tp = self.work, self.plan.mesh.tp
        tied = work.tied / tp if self.plan.mesh.pp > 1 else 0.0
        return work.held(0, tp) * (rank == 0) + (work.held(2, tp) + tied) * self.last(rank)

    def experts(self, rank: int) -> float:
        """Parameters of experts on a rank of pp, before ep divides them."""
        mesh = self.plan.mesh
        return self.work.experts / mesh.tp * sum(self.sizes[rank :: mesh.pp])

    def elements(self, rank: int, *, divided: bool = True) -> float:
        """Parameters on a rank of pp (of tp: one of its ranks). `divided`: experts are parted over ep."""
        mesh = self.plan.mesh
        inner = self.work.held(1, mesh.tp) * sum(self.sizes[rank :: mesh.pp])
        if divided:
            inner -= self.experts(rank) * (1 - 1 / mesh.ep)
        return inner + self.outside(rank)

    def tensors(self, rank: int) -> float:
        """Parameters, each a tensor of its own, of a rank of pp."""
        before, block, after = self.work.tensors
        inner = block * sum(self.sizes[rank :: self.plan.mesh.pp])
        return before * (rank == 0) + inner + after * self.last(rank)

    def shard(self, rank: int) -> float:
        """Parameters of a rank of pp that one rank of ZeRO has: of experts those of as many ranks as have the same."""
        mesh, experts = self.plan.mesh, self.experts(rank)
        others = self.elements(rank, divided=False) - experts
        return others / self.shards + experts / mesh.ep / min(self.shards, max(self.data // mesh.ep, 1))

    def in_flight(self, rank: int) -> float:
        """Micro-batches that wait for their backward on a rank of pp, in all that its stages keep of one."""
        pp = self.plan.mesh.pp
        return 1.0 if pp == 1 else pipeline_order.in_flight(self.schedule, pp, self.chunks, self.count, rank)


def lay_out(
    work: Work,
    batch: int,
    cluster: Cluster,
    plan: Plan,
    stack: Stack,
    *,
    largest: int | None = None,
    here: tuple[int, ...] | None = None,
    devices: int | None = None,
) -> Layout:
    """`plan` on `cluster`, whose devices are alike; refuses what cannot be. `largest`: samples of the rank that has most, where it is
    not the one of all that counts; `here`: the ranks of pp that are on such devices, where it is not all;
    `devices`: of the cluster, where they were counted."""
    device = cluster.nodes[0].devices[0]
    mesh = plan.mesh
    if device.sheet is None:
        raise PlanError(f"{cluster.name}: {device.name} has no data sheet; give its rates in the cluster's file")
    if batch < mesh.dp:
        raise PlanError(f"dp={mesh.dp}: a batch of {batch} cannot feed so many ranks; use dp={batch} or less")
    have = devices or sum(len(node.devices) for node in cluster.nodes)
    if device.kind == "cuda" and plan.ranks > have:
        raise PlanError(f'"{plan}" needs {plan.ranks} devices, {cluster.name} has {have}')
    if mesh.ep > 1 and not work.experts:
        raise PlanError(
            f"ep={mesh.ep}: no block of the model has experts side by side in a list or one weight; use ep=1"
        )
    if mesh.ep > 1 and work.number % mesh.ep:
        raise PlanError(
            f"ep={mesh.ep}: {work.number} experts of a block cannot be parted so; use an ep that divides them"
        )
    work = recast(work, plan.precision)
    count = rounds(batch, mesh.dp, plan.micro, plan.shares)
    stages, sizes, crossing = _stages(work, plan, stack)
    schedule = runs_as(plan, count)
    if stack.chunks is not None:
        # Others interleave few micro-batches too.
        schedule = pipeline_order.executed(
            "interleaved" if stack.chunks > 1 else plan.schedule, mesh.pp, stack.chunks, count
        )
    return Layout(
        work=work,
        sheet=device.sheet,
        plan=plan,
        stack=stack,
        batch=batch,
        # Where shares are not alike the largest decides.
        micro=-(-(largest or largest_share(batch, mesh.dp, plan.shares)) // count),
        count=count,
        schedule=schedule,
        stages=stages,
        sizes=sizes,
        crossing=crossing,
        capacity=float(device.memory),
        nodes=-(-plan.ranks // len(cluster.nodes[0].devices)),
        here=tuple(range(mesh.pp)) if here is None else here,
    )


Parted = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]


def _stages(work: Work, plan: Plan, stack: Stack) -> Parted:
    """(blocks that each stage computes, blocks that it holds, bytes per sample that it gets)."""
    count = plan.mesh.pp * stack.chunks if stack.chunks else stage_count(plan)
    if work.places and plan.stages:
        return _at(work, plan)
    if count <= work.layers:
        dealt = _dealt(work.layers, count)
        return dealt, dealt, (0.0, *[work.given] * (count - 1))
    begins = divide([place.blocks for place in work.places], count) if len(work.places) >= count else None
    if begins is None:
        raise PlanError(f"{work.layers} blocks cannot make {count} stages; use a smaller pp")
    return _at(work, Plan(mesh=plan.mesh, stages=begins))


def _at(work: Work, plan: Plan) -> Parted:
    """By the places where stages begin."""
    places = work.places
    ranges = [range(len(places))] if not plan.stages else stage_ranges(plan, len(places))
    blocks, elements = [place.blocks for place in places], [place.elements for place in places]
    return (
        tuple(sum(blocks[each.start : each.stop]) for each in ranges),
        tuple(sum(elements[each.start : each.stop]) for each in ranges),
        tuple(places[each.start].crossing for each in ranges),
    )


def _dealt(layers: int, stages: int) -> tuple[float, ...]:
    """Blocks of each stage: alike, and what is left over to those in the middle, which have nothing besides."""
    base, more = divmod(layers, stages)
    first = (stages - more) // 2
    return tuple(float(base + (first <= stage < first + more)) for stage in range(stages))
