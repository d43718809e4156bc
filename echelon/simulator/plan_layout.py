"""What each rank of the pipeline computes, holds and receives under a plan, before pricing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from echelon.errors import PlanError
from echelon.plan.batch_split import largest_local_batch, split_evenly
from echelon.plan.plan import Plan, Recompute
from echelon.plan.profile import OptimizerProfile
from echelon.plan.stages import balance_stages, stage_count, stage_ranges
from echelon.simulator import pipeline_schedule
from echelon.simulator.model_summary import ModelSummary, OperatorSummary, PartSummary, convert_precision
from echelon.simulator.training_stack import TrainingStack
from echelon.simulator.whole_tensor_cost import OwnedTensors, find_owned_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLayout:
    """Figures of one rank per pipeline stage: over tp, the rank that holds most."""

    model: ModelSummary
    plan: Plan
    stack: TrainingStack
    batch: int
    micro_batch_sizes: tuple[int, ...]  #: samples
    schedule: str  #: as it runs with this number of micro-batches
    stage_blocks: tuple[float, ...]  #: computation of each stage, in blocks; stage `n` is on rank `n % pp`
    stage_held_blocks: tuple[float, ...]  #: block parameters of each stage, in blocks
    stage_input_bytes: tuple[float, ...]  #: bytes per sample that each stage receives from the previous one
    pp_ranks: tuple[int, ...]  #: ranks of pp on devices of this kind
    is_converted: bool  #: the plan's precision is not the profile's
    #: Whether memory peaks where the trace peaked, as far as the plan runs the model as traced.
    trusts_trace: bool = False

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return len(self.micro_batch_sizes)

    @property
    def largest_micro_batch(self) -> float:
        """Samples of the largest micro-batch on one rank of cp."""
        return max(self.micro_batch_sizes) / self.plan.mesh.cp

    @property
    def sample_shares(self) -> dict[float, float]:
        """Samples of a micro-batch on one rank of cp -> the fraction of micro-batches of that size."""
        counts = Counter(self.micro_batch_sizes)
        return {size / self.plan.mesh.cp: count / self.micro_batches for size, count in counts.items()}

    @property
    def chunks(self) -> int:
        """Stages per rank of pp."""
        return len(self.stage_blocks) // self.plan.mesh.pp

    @property
    def last_stage(self) -> int:
        """The stage that computes the loss."""
        return len(self.stage_blocks) - 1

    @property
    def recompute(self) -> Recompute:
        """What repeated blocks recompute by the plan; the stack may have its own way."""
        return self.plan.recompute if self.stack.recompute == "plan" and self.model.repeats_blocks else "none"

    @property
    def runs_as_traced(self) -> bool:
        """Whether a rank computes and keeps exactly what the trace did."""
        mesh = self.plan.mesh
        return self.trusts_trace and mesh.tp == mesh.pp == 1 and self.recompute == "none"

    @property
    def data_ranks(self) -> int:
        """Ranks with the same parameters and different samples, or parts of samples."""
        return self.plan.mesh.dp * self.plan.mesh.cp

    @property
    def zero_shards(self) -> int:
        """Ranks over which ZeRO shards."""
        return min(self.stack.shard_group_size or self.data_ranks, self.data_ranks)

    @property
    def sequence_shards(self) -> int:
        """Shards of the sequence between the modules that tp cuts."""
        return self.plan.mesh.tp if self.plan.tensor.sequence else 1

    @property
    def gradient_width(self) -> float:
        """Bytes of one element of accumulated gradients."""
        return self.stack.gradient_width or self.model.parameter_width

    @property
    def message_width(self) -> float:
        """Bytes of one element of gradients in messages, averaged over all parameters: frozen ones have none."""
        return (self.stack.message_width or self.model.parameter_width) * self.model.trained_fraction

    @property
    def has_master_weights(self) -> bool:
        """Whether the optimizer holds a 4-byte copy of the parameters."""
        return self.stack.master_weights and self.model.parameter_width < 4

    def state_width(self, optimizer: OptimizerProfile) -> float:
        """Bytes of an optimizer's state per element; master weights have states of 4 bytes."""
        width = optimizer.state_bytes / max(optimizer.trainable_elements, 1)
        return width * (4 / self.model.parameter_width) + 4 if self.has_master_weights else width

    def part(self, name: str) -> PartSummary:
        """A part of the model by its name."""
        part: PartSummary = getattr(self.model, name)
        return part

    def computes_loss(self, rank: int) -> bool:
        """Whether a rank of pp computes the loss."""
        return rank == self.last_stage % self.plan.mesh.pp

    def held_blocks(self, rank: int) -> float:
        """Block parameters on a rank of pp, in blocks."""
        return sum(self.stage_held_blocks[rank :: self.plan.mesh.pp])

    def computed_blocks(self, rank: int) -> float:
        """Block computation on a rank of pp, in blocks."""
        return sum(self.stage_blocks[rank :: self.plan.mesh.pp])

    @property
    def block_elements(self) -> float:
        """Parameters of one block on one rank before ep divides the experts."""
        return self.model.block.tp_elements(self.plan.mesh.tp)

    @property
    def held_block_elements(self) -> float:
        """Parameters of one block on one rank, with experts divided over ep."""
        return self.block_elements - self.block_expert_elements * (1 - 1 / self.plan.mesh.ep)

    @property
    def block_expert_elements(self) -> float:
        """Expert parameters of one block on one rank before ep divides them."""
        return self.model.expert_elements / self.plan.mesh.tp

    def outside_elements(self, rank: int) -> float:
        """Parameters outside of blocks on a rank of pp."""
        model, tp = self.model, self.plan.mesh.tp
        if self.plan.mesh.pp == 1:
            return model.before.tp_elements(tp) + model.after.tp_elements(tp)
        before = model.before.tp_elements(tp) if rank == 0 else model.before.shared_elements
        after = model.after.tp_elements(tp) + model.tied_elements / tp
        return before + (after if self.computes_loss(rank) else model.after.shared_elements)

    def expert_elements(self, rank: int) -> float:
        """Expert parameters on a rank of pp before ep divides them."""
        return self.block_expert_elements * self.held_blocks(rank)

    def rank_elements(self, rank: int, *, shard_experts: bool = True) -> float:
        """Parameters on a rank of pp. `shard_experts`: with experts divided over ep."""
        block = self.held_block_elements if shard_experts else self.block_elements
        return block * self.held_blocks(rank) + self.outside_elements(rank)

    def shard_elements(self, rank: int) -> float:
        """Parameters of a rank of pp on one rank of ZeRO, which shards experts over the ranks that replicate them."""
        mesh, experts = self.plan.mesh, self.expert_elements(rank)
        others = self.rank_elements(rank, shard_experts=False) - experts
        return others / self.zero_shards + experts / mesh.ep / min(self.zero_shards, max(self.data_ranks // mesh.ep, 1))

    def updated_elements(self, rank: int) -> float:
        """Parameters that the optimizer of a rank of pp updates."""
        elements = self.shard_elements(rank) if self.plan.zero else self.rank_elements(rank)
        return elements * self.model.trained_fraction

    def optimizers(self) -> Iterator[tuple[OptimizerProfile, float, OwnedTensors | None]]:
        """(optimizer, its fraction of the trained elements, what a rank owns of its tensors if it steps on full ones)."""
        total = max(sum(optimizer.trainable_elements for optimizer in self.model.optimizers), 1)
        for optimizer in self.model.optimizers:
            owned = find_owned_tensors(self.plan, optimizer.update_scope, optimizer.uses_rng)
            yield optimizer, optimizer.trainable_elements / total, owned

    def tensors(self, rank: int, *, large: bool = False) -> float:
        """Number of parameters on a rank of pp. `large`: only those of a megabyte or more."""
        parts = self.model.before, self.model.block, self.model.after
        before, block, after = (part.large_tensors if large else part.tensors for part in parts)
        return before * (rank == 0) + block * self.held_blocks(rank) + after * self.computes_loss(rank)

    def operator_shards(self, operator: OperatorSummary) -> int:
        """Ranks that divide an operator's work: tp, or the sequence shards where tp cuts nothing."""
        return self.plan.mesh.tp if operator.tp_sharded else self.sequence_shards

    def in_flight_micro_batches(self, rank: int) -> float:
        """Micro-batches whose activations a rank of pp holds, counted in activations of all its stages."""
        pp = self.plan.mesh.pp
        if pp == 1:
            return 1.0
        return pipeline_schedule.in_flight_micro_batches(self.schedule, pp, self.chunks, self.micro_batches, rank)


def lay_out_plan(
    model: ModelSummary,
    batch: int,
    plan: Plan,
    stack: TrainingStack | None = None,
    *,
    local_batch: int | None = None,
    pp_ranks: tuple[int, ...] | None = None,
    trusts_trace: bool = False,
) -> PlanLayout:
    """Lay out `plan`; raises PlanError if that is impossible. `local_batch`: samples per data rank, by default the largest. `pp_ranks`: the
    ranks of pp on this kind of device, by default all."""
    mesh, stack = plan.mesh, stack or TrainingStack()
    if batch < mesh.dp:
        raise PlanError(f"dp={mesh.dp}: a batch of {batch} has fewer samples than ranks; use dp={batch} or less")
    if mesh.ep > 1 and not model.expert_elements:
        raise PlanError(f"ep={mesh.ep}: the model has no experts (equal modules in a list, or a 3-D weight); use ep=1")
    if mesh.ep > 1 and model.expert_count % mesh.ep:
        raise PlanError(f"ep={mesh.ep}: does not divide the {model.expert_count} experts of a block; use a divisor")
    micro_batches = plan.count_micro_batches(batch)
    samples = local_batch or largest_local_batch(batch, mesh.dp, plan.data.batch_shares)
    converted = convert_precision(model, plan.precision)
    stage_blocks, stage_held_blocks, stage_input_bytes = _split_stages(converted, plan, stack)
    return PlanLayout(
        model=converted,
        plan=plan,
        stack=stack,
        batch=batch,
        micro_batch_sizes=tuple(part.size for part in split_evenly(0, samples, micro_batches)),
        schedule=_schedule(plan, stack, micro_batches),
        stage_blocks=stage_blocks,
        stage_held_blocks=stage_held_blocks,
        stage_input_bytes=stage_input_bytes,
        pp_ranks=tuple(range(mesh.pp)) if pp_ranks is None else pp_ranks,
        is_converted=plan.precision not in (None, model.precision),
        # In another width the model keeps other activations.
        trusts_trace=trusts_trace and converted.saved is model.saved,
    )


def _schedule(plan: Plan, stack: TrainingStack, micro_batches: int) -> str:
    schedule, pp, stages = plan.pipeline.schedule, plan.mesh.pp, stage_count(plan)
    if stack.chunks is not None:
        # Other systems interleave few micro-batches too.
        schedule = "interleaved" if stack.chunks > 1 else schedule
        return pipeline_schedule.effective_schedule(schedule, pp, stack.chunks, micro_batches)
    # With fewer micro-batches than stages, all forwards run first, then all backwards.
    if micro_batches < stages:
        return "gpipe"
    return pipeline_schedule.effective_schedule(schedule, pp, stages // pp, micro_batches)


StageSplit = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]


def _split_stages(model: ModelSummary, plan: Plan, stack: TrainingStack) -> StageSplit:
    """Per stage: (blocks that it computes, blocks that it holds, bytes per sample that it receives)."""
    stages = plan.mesh.pp * stack.chunks if stack.chunks else stage_count(plan)
    if model.pipeline_units and plan.pipeline.stages:
        return _split_at_starts(model, plan)
    if stages <= model.layers:
        blocks = _spread_blocks(model.layers, stages)
        return blocks, blocks, (0.0, *[model.block_output_bytes] * (stages - 1))
    costs = [unit.blocks for unit in model.pipeline_units]
    starts = balance_stages(costs, stages) if len(costs) >= stages else None
    if starts is None:
        raise PlanError(f"{model.layers} blocks cannot make {stages} stages; use a smaller pp")
    return _split_at_starts(model, plan.replace(stages=starts))


def _split_at_starts(model: ModelSummary, plan: Plan) -> StageSplit:
    units = model.pipeline_units
    ranges = stage_ranges(plan, len(units)) if plan.pipeline.stages else [range(len(units))]
    return (
        tuple(sum(units[index].blocks for index in stage) for stage in ranges),
        tuple(sum(units[index].elements for index in stage) for stage in ranges),
        tuple(units[stage.start].boundary_bytes for stage in ranges),
    )


def _spread_blocks(layers: int, stages: int) -> tuple[float, ...]:
    """Blocks of each stage: as even as possible, with more in the middle, where nothing else runs."""
    base, remainder = divmod(layers, stages)
    first_larger = (stages - remainder) // 2
    return tuple(float(base + (first_larger <= stage < first_larger + remainder)) for stage in range(stages))
