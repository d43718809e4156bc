"""The time of a step by cause: what each stage computes and communicates, and the critical path through the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.plan.forecast import TimeForecast
from echelon.plan.profile import Phase
from echelon.simulator import exchange
from echelon.simulator.compute import PlacedPlan, pass_time, recompute_seconds
from echelon.simulator.cost.cost_model import HostSeconds, HostWork
from echelon.simulator.memory import saved_bytes
from echelon.simulator.model_summary import PartName
from echelon.simulator.pipeline_schedule import makespan, makespan_lower_bound
from echelon.simulator.plan_layout import PlanLayout

#: The relative error that a forecast admits (the limit of bench/forecast).
RELATIVE_ERROR = 0.25
_OUTSIDE: tuple[PartName, ...] = ("before", "after")
_PHASES: tuple[Phase, ...] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of each stage for one micro-batch, forward and backward."""

    compute: tuple[list[float], list[float]]
    communication: tuple[list[float], list[float]]  #: the exposed part
    hidden: float  #: communication of one block that computation hides

    def stage_parts(self, stage: int) -> list[float]:
        """One stage: computation forward and backward, communication forward and backward."""
        return [seconds[stage] for seconds in (*self.compute, *self.communication)]

    def rank_parts(self, rank: int, ranks: int) -> list[float]:
        """The same of all stages of a rank of pp."""
        return [sum(seconds[rank::ranks]) for seconds in (*self.compute, *self.communication)]


@dataclass(frozen=True, slots=True)
class StepParts:
    """The components of a step."""

    stages: StageTimes
    #: Seconds of each stage for one micro-batch, exposed communication and host stalls included.
    forward: list[float]
    backward: list[float]
    host: HostSeconds
    optimizer: float
    exchange: float  #: exposed, once per step
    hidden_exchange: float


def step_time(placed: Sequence[PlacedPlan], *, event_by_event: bool = True) -> TimeForecast:
    """Seconds of a step by cause, each stage on its slowest devices. `event_by_event`: walk the pipeline's schedule; otherwise use a lower
    bound for any schedule."""
    layout, parts = placed[0].layout, step_parts(placed)
    pp, micro_batches = layout.plan.mesh.pp, layout.micro_batches
    pipeline_time = makespan if event_by_event else makespan_lower_bound
    pipeline = pipeline_time(layout.schedule, parts.forward, parts.backward, ranks=pp, micro_batches=micro_batches)
    slowest_rank = max((parts.stages.rank_parts(rank, pp) for rank in range(pp)), key=sum)
    forward, backward, *communication = (micro_batches * seconds for seconds in slowest_rank)
    host = micro_batches * parts.host.per_micro_batch
    causes = {
        "forward": forward,
        "backward": backward,
        "bubble": max(pipeline - forward - backward - sum(communication) - host, 0.0) if pp > 1 else 0.0,
        "exchange": sum(communication) + parts.exchange,
        "optimizer": parts.optimizer,
        "input": max(
            each.cost.input_seconds(sum(each.layout.micro_batch_sizes), layout.model.input_bytes, forward + backward)
            for each in placed
        ),
        "overhead": parts.host.per_step + host,
    }
    # The slowest of many nodes holds up all.
    causes["overhead"] += placed[0].cost.straggler_fraction(layout.plan.ranks) * sum(causes.values())
    step = sum(causes.values())
    hidden = parts.stages.hidden * micro_batches * max(layout.stage_blocks) + parts.hidden_exchange
    return TimeForecast(**causes, hidden=hidden, low=step * (1 - RELATIVE_ERROR), high=step * (1 + RELATIVE_ERROR))


def step_parts(placed: Sequence[PlacedPlan]) -> StepParts:
    """The components of a step."""
    layout = placed[0].layout
    pp, chunks = layout.plan.mesh.pp, layout.chunks
    by_size = {samples: _slowest_stage_times(placed, samples) for samples in layout.sample_shares}
    stages = _mean_stage_times(by_size, layout)
    optimizer = max(map(_optimizer_seconds, placed))
    hosts = [_host_seconds(_on_rank(placed, rank), rank, by_size, optimizer) for rank in range(pp)]
    forward, backward = (
        [
            compute + communication + hosts[stage % pp].per_micro_batch / 2 / chunks
            for stage, (compute, communication) in enumerate(zip(*parts, strict=True))
        ]
        for parts in zip(stages.compute, stages.communication, strict=True)
    )
    exposed, hidden = max(exchange.data_parallel_seconds(each, backward[-1]) for each in placed)
    host = HostSeconds(max(each.per_micro_batch for each in hosts), max(each.per_step for each in hosts))
    return StepParts(stages, forward, backward, host, optimizer, exposed, hidden)


def _on_rank(placed: Sequence[PlacedPlan], rank: int) -> PlacedPlan:
    """The plan on the devices of a rank of pp."""
    return next(each for each in placed if rank in each.layout.pp_ranks)


def _slowest_stage_times(placed: Sequence[PlacedPlan], samples: float) -> StageTimes:
    """Each stage on its slowest devices."""
    by_kind = [_stage_times(each, samples) for each in placed]
    if len(by_kind) == 1:
        return by_kind[0]
    ranks, stages = placed[0].layout.plan.mesh.pp, range(len(placed[0].layout.stage_blocks))
    slowest = [
        max(
            (
                times.stage_parts(stage)
                for times, each in zip(by_kind, placed, strict=True)
                if stage % ranks in each.layout.pp_ranks
            ),
            key=sum,
        )
        for stage in stages
    ]
    forward, backward, forward_comm, backward_comm = (list(parts) for parts in zip(*slowest, strict=True))
    return StageTimes((forward, backward), (forward_comm, backward_comm), max(times.hidden for times in by_kind))


def _mean_stage_times(by_size: dict[float, StageTimes], layout: PlanLayout) -> StageTimes:
    """The mean over the micro-batches of a step."""
    if len(by_size) == 1:
        return next(iter(by_size.values()))
    shares = layout.sample_shares

    def mean(name: str, direction: int) -> list[float]:
        columns = zip(*(getattr(by_size[size], name)[direction] for size in shares), strict=True)
        return [sum(share * value for share, value in zip(shares.values(), column, strict=True)) for column in columns]

    return StageTimes(
        (mean("compute", 0), mean("compute", 1)),
        (mean("communication", 0), mean("communication", 1)),
        sum(share * by_size[size].hidden for size, share in shares.items()),
    )


def _stage_times(placed: PlacedPlan, samples: float) -> StageTimes:
    """One micro-batch of `samples` on each stage."""
    layout, cost = placed.layout, placed.cost
    last, pp, stages = layout.last_stage, layout.plan.mesh.pp, range(len(layout.stage_blocks))
    forward, backward = (pass_time(placed, "block", phase, samples) for phase in _PHASES)
    accumulate = _accumulate_seconds(placed, layout.held_block_elements)
    block_compute = [forward.total, backward.total + recompute_seconds(placed, samples) + accumulate]
    block_comm = list(exchange.block_seconds(placed, forward, backward, samples))
    hidden = 0.0
    for direction, seconds in enumerate(exchange.zero3_block_seconds(placed)):
        behind = cost.hidden_seconds(seconds, block_compute[direction]) if layout.stack.overlaps_data_parallel else 0.0
        block_comm[direction] += seconds - behind
        hidden += behind
    compute, comm = (
        tuple([blocks * seconds for blocks in layout.stage_blocks] for seconds in both)
        for both in (block_compute, block_comm)
    )
    for part, stage in zip(_OUTSIDE, (0, last), strict=True):
        for direction, phase in enumerate(_PHASES):
            compute[direction][stage] += pass_time(placed, part, phase, samples).total
            comm[direction][stage] += exchange.tp_seconds(placed, part, phase, samples)
    for stage in range(pp) if layout.plan.data.shard_as_one else {0, last}:
        for direction, seconds in enumerate(exchange.zero3_root_seconds(placed, stage % pp)):
            comm[direction][stage] += seconds
    for stage in stages[1:]:
        seconds = exchange.send_seconds(placed, stage, block_compute[0], samples)
        # In forward the previous stage sends, in backward this one.
        comm[0][stage - 1] += seconds
        comm[1][stage] += seconds
    for stage in stages:
        rank = stage % pp
        gradient_bytes = layout.rank_elements(rank) * layout.message_width if layout.data_ranks == 1 else 0.0
        compute[0][stage] += cost.fresh_memory_seconds(saved_bytes(layout, rank, samples) / layout.chunks)
        compute[1][stage] += cost.fresh_memory_seconds(gradient_bytes / layout.chunks)
        compute[1][stage] += _accumulate_seconds(placed, layout.outside_elements(rank)) / layout.chunks
    return StageTimes((compute[0], compute[1]), (comm[0], comm[1]), hidden)


def _accumulate_seconds(placed: PlacedPlan, elements: float) -> float:
    """Accumulating gradients over micro-batches, averaged over all of them: the first adds nothing."""
    layout, plan = placed.layout, placed.layout.plan
    shards = layout.zero_shards if plan.zero >= 2 and not plan.data.keep_gradients else 1
    width = 2 * layout.gradient_width + layout.model.parameter_width
    moved = elements / shards * layout.model.trained_fraction * width
    return placed.cost.stream_seconds("add_", moved) * (1 - 1 / layout.micro_batches)


def _optimizer_seconds(placed: PlacedPlan) -> float:
    """The update on the rank that updates most, and gradient clipping. Moves gradients, states both ways, and parameters (master weights
    are a state)."""
    layout, cost, model, plan = placed.layout, placed.cost, placed.layout.model, placed.layout.plan
    updated = max(map(layout.updated_elements, layout.pp_ranks))
    seconds = 0.0
    for optimizer, share, owned in layout.optimizers():
        elements = share * (updated if owned is None else owned.fraction * model.trained_elements)
        parameters = model.parameter_width * (1 if layout.has_master_weights else 2)
        width = layout.gradient_width + 2 * layout.state_width(optimizer) + parameters
        fused = owned is None and plan.fused and optimizer.has_fused_kernel(sharded=plan.is_sharded)
        seconds += cost.optimizer_seconds(optimizer, elements, fused=fused, width=width)
    if model.clips_gradients:
        seconds += cost.stream_seconds("mul", 3 * layout.gradient_width * updated)
    return seconds


def _host_seconds(placed: PlacedPlan, rank: int, by_size: dict[float, StageTimes], optimizer: float) -> HostSeconds:
    """How much the host of a rank lengthens a step."""
    layout, plan, blocks = placed.layout, placed.layout.plan, placed.layout.computed_blocks(rank)
    samples, micro_batches = layout.largest_micro_batch, layout.micro_batches
    forward, backward = (pass_time(placed, "block", phase, samples) for phase in _PHASES)
    again = pass_time(placed, "block", "recompute", samples)
    # (times, pass, whether it is forward)
    passes = [(blocks, forward, True), (blocks, backward, False)]
    for part, runs in zip(_OUTSIDE, (rank == 0, layout.computes_loss(rank)), strict=True):
        passes += [(float(runs), pass_time(placed, part, phase, samples), phase == "forward") for phase in _PHASES]
    accumulate = _accumulate_seconds(placed, layout.rank_elements(rank))
    compute = {size: times.rank_parts(rank, plan.mesh.pp)[:2] for size, times in by_size.items()}
    return placed.cost.host_seconds(
        HostWork(
            micro_batches=tuple(
                (size, compute[size / plan.mesh.cp][0], compute[size / plan.mesh.cp][1] - accumulate)
                for size in layout.micro_batch_sizes
            ),
            tensors=layout.tensors(rank),
            forward_calls=sum(times * each.calls for times, each, is_forward in passes if is_forward),
            backward_calls=sum(times * each.calls for times, each, is_forward in passes if not is_forward),
            matmul_calls=sum(times * each.matmul_calls for times, each, _ in passes),
            convolution_calls=sum(times * each.convolution_calls for times, each, _ in passes),
            recompute=layout.recompute,
            block_calls=blocks * forward.calls if layout.recompute != "none" else 0.0,
            recomputed_calls=blocks * again.calls,
            fused_optimizer=plan.fused
            and all(each.has_fused_kernel(sharded=plan.is_sharded) for each in layout.model.optimizers),
            accumulate_seconds=accumulate / (1 - 1 / micro_batches) if micro_batches > 1 else 0.0,
            optimizer_seconds=optimizer,
        )
    )
