"""A plan laid out on a cluster that is known by its data sheets: what each rank of the pipeline has, before anything is priced."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.errors import PlanError
from echelon.plan.batch_split import count_micro_batches, largest_local_batch
from echelon.plan.cluster import Cluster, DataSheet
from echelon.plan.plan import PipelinePlan, Plan
from echelon.plan.stages import balance_stages, stage_count, stage_ranges
from echelon.simulator import pipeline_order
from echelon.simulator.model_summary import ModelSummary, convert_precision
from echelon.simulator.pipeline_schedule import effective_schedule
from echelon.simulator.training_stack import TrainingStack


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLayout:
    """Nothing here depends on fitted constants."""

    model: ModelSummary
    sheet: DataSheet
    plan: Plan
    stack: TrainingStack
    batch: int
    micro_batch_size: int
    micro_batch_count: int  #: micro-batches
    schedule: str  #: as so many micro-batches are run
    stage_blocks: tuple[float, ...]  #: what each stage computes, in blocks; stage `n` is on rank `n % pp`
    stage_held_blocks: tuple[float, ...]  #: parameters of blocks that each stage holds, in blocks
    stage_input_bytes: tuple[float, ...]  #: bytes per sample that each stage gets from the one before
    capacity: float
    nodes: int
    pp_ranks: tuple[int, ...]  #: ranks of pp that are on devices of this kind

    @property
    def chunks(self) -> int:
        """Stages of one rank of pp."""
        return len(self.stage_blocks) // self.plan.mesh.pp

    @property
    def samples(self) -> float:
        """Samples of a micro-batch as one rank computes them: cp parts each."""
        return self.micro_batch_size / self.plan.mesh.cp

    @property
    def data_ranks(self) -> int:
        """Ranks that have the same parameters and other samples, or other parts of them."""
        return self.plan.mesh.dp * self.plan.mesh.cp

    @property
    def zero_shards(self) -> int:
        """Ranks over which ZeRO divides."""
        return min(self.stack.shard_group_size or self.data_ranks, self.data_ranks)

    @property
    def sequence_shards(self) -> int:
        """Parts into which what tp does not cut is divided."""
        return self.plan.mesh.tp if self.plan.tensor.sequence else 1

    @property
    def gradient_width(self) -> float:
        """Bytes of one number of the gradients that are kept between micro-batches."""
        return self.stack.gradient_width or self.model.parameter_width

    @property
    def message_width(self) -> float:
        """Bytes of one number of the gradients in messages."""
        return self.stack.message_width or self.model.parameter_width

    @property
    def has_master_weights(self) -> bool:
        """Whether there is a wide copy of the parameters."""
        return self.stack.master_weights and self.model.parameter_width < 4

    @property
    def optimizer_state_bytes(self) -> float:
        """Bytes that the optimizer holds for one parameter: a wide copy has wide states."""
        return (
            self.model.optimizer_state_bytes * (4 / self.model.parameter_width) + 4
            if self.has_master_weights
            else self.model.optimizer_state_bytes
        )

    def computes_loss(self, rank: int) -> bool:
        """Whether a rank of pp computes the loss."""
        return rank == (len(self.stage_blocks) - 1) % self.plan.mesh.pp

    def outside_elements(self, rank: int) -> float:
        """Parameters outside of blocks on a rank of pp."""
        model, tp = self.model, self.plan.mesh.tp
        tied_elements = model.tied_elements / tp if self.plan.mesh.pp > 1 else 0.0
        return model.elements_per_tp_rank(0, tp) * (rank == 0) + (
            model.elements_per_tp_rank(2, tp) + tied_elements
        ) * self.computes_loss(rank)

    def expert_elements(self, rank: int) -> float:
        """Parameters of experts on a rank of pp, before ep divides them."""
        mesh = self.plan.mesh
        return self.model.expert_elements / mesh.tp * sum(self.stage_held_blocks[rank :: mesh.pp])

    def rank_elements(self, rank: int, *, shard_experts: bool = True) -> float:
        """Parameters on a rank of pp (of tp: one of its ranks). `shard_experts`: experts are parted over ep."""
        mesh = self.plan.mesh
        block_elements = self.model.elements_per_tp_rank(1, mesh.tp) * sum(self.stage_held_blocks[rank :: mesh.pp])
        if shard_experts:
            block_elements -= self.expert_elements(rank) * (1 - 1 / mesh.ep)
        return block_elements + self.outside_elements(rank)

    def tensor_count(self, rank: int) -> float:
        """Parameters, each a tensor of its own, of a rank of pp."""
        before, block, after = self.model.tensor_counts
        block_tensors = block * sum(self.stage_held_blocks[rank :: self.plan.mesh.pp])
        return before * (rank == 0) + block_tensors + after * self.computes_loss(rank)

    def shard_elements(self, rank: int) -> float:
        """Parameters of a rank of pp that one rank of ZeRO has: of experts those of as many ranks as have the same."""
        mesh, expert_elements = self.plan.mesh, self.expert_elements(rank)
        other_elements = self.rank_elements(rank, shard_experts=False) - expert_elements
        return other_elements / self.zero_shards + expert_elements / mesh.ep / min(
            self.zero_shards, max(self.data_ranks // mesh.ep, 1)
        )

    def in_flight_micro_batches(self, rank: int) -> float:
        """Micro-batches that wait for their backward on a rank of pp, in all that its stages keep of one."""
        pp = self.plan.mesh.pp
        return (
            1.0
            if pp == 1
            else pipeline_order.in_flight_micro_batches(self.schedule, pp, self.chunks, self.micro_batch_count, rank)
        )


def lay_out_plan(
    model: ModelSummary,
    batch: int,
    cluster: Cluster,
    plan: Plan,
    stack: TrainingStack,
    *,
    most_samples: int | None = None,
    pp_ranks: tuple[int, ...] | None = None,
    device_count: int | None = None,
) -> PlanLayout:
    """`plan` on `cluster`, whose devices are alike; refuses what cannot be. `most_samples`: samples of the rank that has most, where it is
    not the one of all that counts; `pp_ranks`: the ranks of pp that are on such devices, where it is not all;
    `device_count`: of the cluster, where they were counted."""
    device = cluster.nodes[0].devices[0]
    mesh = plan.mesh
    if device.sheet is None:
        raise PlanError(f"{cluster.name}: {device.name} has no data sheet; give its rates in the cluster's file")
    if batch < mesh.dp:
        raise PlanError(f"dp={mesh.dp}: a batch of {batch} cannot feed so many ranks; use dp={batch} or less")
    available_devices = device_count or sum(len(node.devices) for node in cluster.nodes)
    if device.kind == "cuda" and plan.ranks > available_devices:
        raise PlanError(f'"{plan}" needs {plan.ranks} devices, {cluster.name} has {available_devices}')
    if mesh.ep > 1 and not model.expert_elements:
        raise PlanError(
            f"ep={mesh.ep}: no block of the model has experts side by side in a list or one weight; use ep=1"
        )
    if mesh.ep > 1 and model.expert_count % mesh.ep:
        raise PlanError(
            f"ep={mesh.ep}: {model.expert_count} experts of a block cannot be parted so; use an ep that divides them"
        )
    model = convert_precision(model, plan.precision)
    micro_batch_count = count_micro_batches(batch, mesh.dp, plan.micro, plan.data.batch_shares)
    stage_blocks, stage_held_blocks, stage_input_bytes = _split_stages(model, plan, stack)
    schedule = effective_schedule(plan, micro_batch_count)
    if stack.chunks is not None:
        # Others interleave few micro-batches too.
        schedule = pipeline_order.effective_schedule(
            "interleaved" if stack.chunks > 1 else plan.pipeline.schedule, mesh.pp, stack.chunks, micro_batch_count
        )
    return PlanLayout(
        model=model,
        sheet=device.sheet,
        plan=plan,
        stack=stack,
        batch=batch,
        # Where shares are not alike the largest decides.
        micro_batch_size=-(
            -(most_samples or largest_local_batch(batch, mesh.dp, plan.data.batch_shares)) // micro_batch_count
        ),
        micro_batch_count=micro_batch_count,
        schedule=schedule,
        stage_blocks=stage_blocks,
        stage_held_blocks=stage_held_blocks,
        stage_input_bytes=stage_input_bytes,
        capacity=float(device.memory),
        nodes=-(-plan.ranks // len(cluster.nodes[0].devices)),
        pp_ranks=tuple(range(mesh.pp)) if pp_ranks is None else pp_ranks,
    )


StageSplit = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]


def _split_stages(model: ModelSummary, plan: Plan, stack: TrainingStack) -> StageSplit:
    """(blocks that each stage computes, blocks that it holds, bytes per sample that it gets)."""
    total_stages = plan.mesh.pp * stack.chunks if stack.chunks else stage_count(plan)
    if model.pipeline_units and plan.pipeline.stages:
        return _split_at_starts(model, plan)
    if total_stages <= model.layers:
        blocks_by_stage = _spread_blocks(model.layers, total_stages)
        return blocks_by_stage, blocks_by_stage, (0.0, *[model.block_output_bytes] * (total_stages - 1))
    stage_starts = (
        balance_stages([unit.blocks for unit in model.pipeline_units], total_stages)
        if len(model.pipeline_units) >= total_stages
        else None
    )
    if stage_starts is None:
        raise PlanError(f"{model.layers} blocks cannot make {total_stages} stages; use a smaller pp")
    return _split_at_starts(model, Plan(mesh=plan.mesh, pipeline=PipelinePlan(stages=stage_starts)))


def _split_at_starts(model: ModelSummary, plan: Plan) -> StageSplit:
    """By the places where stages begin."""
    units = model.pipeline_units
    unit_ranges = [range(len(units))] if not plan.pipeline.stages else stage_ranges(plan, len(units))
    blocks, elements = [unit.blocks for unit in units], [unit.elements for unit in units]
    return (
        tuple(sum(blocks[unit_range.start : unit_range.stop]) for unit_range in unit_ranges),
        tuple(sum(elements[unit_range.start : unit_range.stop]) for unit_range in unit_ranges),
        tuple(units[unit_range.start].crossing for unit_range in unit_ranges),
    )


def _spread_blocks(layers: int, stages: int) -> tuple[float, ...]:
    """Blocks of each stage: alike, and what is left over to those in the middle, which have nothing besides."""
    base, remainder = divmod(layers, stages)
    first_larger = (stages - remainder) // 2
    return tuple(float(base + (first_larger <= stage < first_larger + remainder)) for stage in range(stages))
