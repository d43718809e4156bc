"""A step on a cluster that is known by its data sheets: what each stage computes and sends, and the longest path through it all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echelon.plan.cluster import Cluster
from echelon.plan.forecast import TimeForecast
from echelon.plan.plan import Plan
from echelon.plan.profile import DTYPE_BYTES
from echelon.simulator.calibration import FittedConstants
from echelon.simulator.cost.network import Network, cluster_network
from echelon.simulator.cost.roofline import (
    PRECISION_BYTES,
    attention_seconds,
    compute_precision,
    elementwise_seconds,
    operand_line_sizes,
    product_seconds,
)
from echelon.simulator.model_summary import OperatorSummary
from echelon.simulator.pipeline_order import makespan, makespan_lower_bound
from echelon.simulator.plan_layout import PlanLayout
from echelon.simulator.training_stack import TrainingStack
from echelon.simulator.whole_tensor_cost import TRANSFERS_PER_STEP, find_owned_tensors

#: Bytes/s at which samples come from the host while the device computes: PCIe 3.0 x16, the slowest of the catalogue's machines.
_HOST_BYTES_PER_SECOND = 12e9
#: How far a step may lie from the forecast.
RELATIVE_ERROR = 0.25

#: What was priced before, for those who price many plans of one model on one device with the same constants.
PassCache = dict[tuple[object, ...], "PassTime"]


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of one pass through a part of the model, by what it is."""

    products: float = 0.0
    attention_core: float = 0.0
    elementwise: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.attention_core + self.elementwise


@dataclass(frozen=True, slots=True)
class _StageTimes:
    """Seconds of each stage for one micro-batch: forward and backward, computing and talking; `hidden`: talk behind compute, of a block."""

    compute: tuple[list[float], list[float]]
    communication: tuple[list[float], list[float]]
    hidden: float

    def stage_parts(self, stage: int) -> list[float]:
        """What one stage takes: compute forward and backward, talk forward and backward."""
        return [seconds_by_stage[stage] for seconds_by_stage in (*self.compute, *self.communication)]

    def rank_parts(self, rank: int, ranks: int) -> list[float]:
        """What the stages of one rank of pp take: compute forward and backward, talk forward and backward."""
        return [sum(seconds_by_stage[rank::ranks]) for seconds_by_stage in (*self.compute, *self.communication)]


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """A plan on devices of one kind, which some of its ranks are on."""

    layout: PlanLayout
    cluster: Cluster  #: as it would be with that kind alone
    pass_cache: PassCache | None = None


def step_time(placed: Sequence[PlacedPlan], constants: FittedConstants, *, event_by_event: bool = True) -> TimeForecast:
    """Seconds of a step, by cause: each stage as it is on the slowest devices that it is on.

    `event_by_event`: the pipeline event by event; otherwise what no schedule can be faster than.
    """
    layout = placed[0].layout
    mesh, micro_batch_count = layout.plan.mesh, layout.micro_batch_count
    stage_times = _slowest_stage_times([_stage_times(each, constants) for each in placed], placed)
    passes_by_stage = _pass_seconds_by_stage(layout, stage_times, constants)
    pipeline_time = makespan if event_by_event else makespan_lower_bound
    pipeline_seconds = pipeline_time(
        layout.schedule, passes_by_stage[0], passes_by_stage[1], ranks=mesh.pp, micro_batch_count=micro_batch_count
    )
    # What the host does between steps and micro-batches it does for each parameter.
    tensor_count = max(layout.tensor_count(rank) for rank in range(mesh.pp))
    host_seconds_per_micro_batch = constants.micro * tensor_count
    slowest_rank_parts = [
        micro_batch_count * each
        for each in max((stage_times.rank_parts(rank, mesh.pp) for rank in range(mesh.pp)), key=sum)
    ]
    exchange, hidden_exchange = max(
        _exchange_seconds(each.layout, _network_of(each, constants), constants, passes_by_stage[1][-1])
        for each in placed
    )
    causes = {
        "forward": slowest_rank_parts[0],
        "backward": slowest_rank_parts[1],
        "bubble": max(
            pipeline_seconds - sum(slowest_rank_parts) - micro_batch_count * host_seconds_per_micro_batch, 0.0
        ),
        "exchange": slowest_rank_parts[2] + slowest_rank_parts[3] + exchange,
        "optimizer": max(_optimizer_seconds(each.layout, constants) for each in placed),
        "input": max(
            layout.micro_batch_size * micro_batch_count * layout.model.input_bytes / _HOST_BYTES_PER_SECOND
            - slowest_rank_parts[0]
            - slowest_rank_parts[1],
            0.0,
        ),
        "overhead": constants.step * tensor_count + micro_batch_count * host_seconds_per_micro_batch,
    }
    # The slowest of many nodes holds up all.
    causes["overhead"] += constants.straggling * math.log2(layout.nodes) * sum(causes.values())
    step = sum(causes.values())
    hidden = stage_times.hidden * micro_batch_count * max(layout.stage_blocks) + hidden_exchange
    return TimeForecast(**causes, hidden=hidden, low=step * (1 - RELATIVE_ERROR), high=step * (1 + RELATIVE_ERROR))


def stage_seconds(placed: Sequence[PlacedPlan], constants: FittedConstants) -> tuple[list[float], list[float], float]:
    """Seconds of each stage for one micro-batch, forward and backward with all that it says; and of what is exchanged once a step."""
    stage_times = _slowest_stage_times([_stage_times(placed_plan, constants) for placed_plan in placed], placed)
    forward, backward = _pass_seconds_by_stage(placed[0].layout, stage_times, constants)
    exchange = max(
        _exchange_seconds(placed_plan.layout, _network_of(placed_plan, constants), constants, backward[-1])[0]
        for placed_plan in placed
    )
    return forward, backward, exchange


def _network_of(placed: PlacedPlan, constants: FittedConstants) -> Network:
    return cluster_network(placed.cluster, placed.layout.plan.ranks, constants)


def _slowest_stage_times(times_by_kind: Sequence[_StageTimes], placed: Sequence[PlacedPlan]) -> _StageTimes:
    """Of each stage what it takes on the devices that it is on and that take longest."""
    if len(times_by_kind) == 1:
        return times_by_kind[0]
    ranks = placed[0].layout.plan.mesh.pp
    part_lists: list[list[float]] = [[], [], [], []]
    for stage in range(len(placed[0].layout.stage_blocks)):
        candidates = (
            stage_times.stage_parts(stage)
            for stage_times, placed_plan in zip(times_by_kind, placed, strict=True)
            if stage % ranks in placed_plan.layout.pp_ranks
        )
        for part_list, seconds in zip(part_lists, max(candidates, key=sum), strict=True):
            part_list.append(seconds)
    return _StageTimes(
        (part_lists[0], part_lists[1]),
        (part_lists[2], part_lists[3]),
        max(placed_plan.hidden for placed_plan in times_by_kind),
    )


def _pass_seconds_by_stage(
    layout: PlanLayout, stage_times: _StageTimes, constants: FittedConstants
) -> list[list[float]]:
    """Forward and backward of each stage: what it computes, says, and what the host does between micro-batches."""
    pp = layout.plan.mesh.pp
    host_seconds = [
        constants.micro / 2 / layout.chunks * layout.tensor_count(stage % pp)
        for stage in range(len(layout.stage_blocks))
    ]
    return [
        [
            compute + communication + host_work
            for compute, communication, host_work in zip(*parts, host_seconds, strict=True)
        ]
        for parts in zip(stage_times.compute, stage_times.communication, strict=True)
    ]


def part_seconds(
    layout: PlanLayout, constants: FittedConstants, pass_cache: PassCache | None = None
) -> tuple[float, float, float]:
    """Seconds that a micro-batch computes before the blocks, in one block and after them, there and back."""
    seconds_by_part: list[float] = []
    for part in ("before", "block", "after"):
        forward, backward = (
            _pass_time(layout, part, phase, constants, pass_cache) for phase in ("forward", "backward")
        )
        recompute_seconds = _recompute_seconds(layout.plan, layout.stack, forward) if part == "block" else 0.0
        seconds_by_part.append(forward.total + backward.total + recompute_seconds)
    return seconds_by_part[0], seconds_by_part[1], seconds_by_part[2]


def _stage_times(placed: PlacedPlan, constants: FittedConstants) -> _StageTimes:
    layout, pass_cache, network = placed.layout, placed.pass_cache, _network_of(placed, constants)
    plan, stack, model, mesh = layout.plan, layout.stack, layout.model, layout.plan.mesh
    forward, backward = (_pass_time(layout, "block", phase, constants, pass_cache) for phase in ("forward", "backward"))
    recompute_seconds = _recompute_seconds(plan, stack, forward)
    compute = [forward.total, backward.total + recompute_seconds + _gradient_accumulation_seconds(layout, constants)]
    tp_seconds = _tensor_parallel_seconds(layout, network, constants, forward.products)
    cp_seconds = _context_parallel_seconds(layout, network, constants, forward.attention_core)
    recomputes_blocks = plan.recompute == "block" and stack.recompute == "plan"
    # Tokens go to their experts and come back, in each pass.
    expert_seconds = 2 * network.all_to_all_seconds(
        model.routed_bytes * layout.samples / layout.sequence_shards, network.group(mesh.ep, mesh.tp)
    )
    communication = [
        tp_seconds + cp_seconds + expert_seconds,
        (tp_seconds + expert_seconds) * (2 if recomputes_blocks else 1) + 2 * cp_seconds,
    ]
    communication[1] += _sequence_regather_seconds(layout, network, constants, backward.products)
    hidden = 0.0
    for phase, exchange_seconds in enumerate(_zero3_block_seconds(layout, network)):
        hidden_seconds = (
            min(exchange_seconds, compute[phase] * constants.overlap) if stack.overlaps_data_parallel else 0.0
        )
        communication[phase] += exchange_seconds - hidden_seconds
        hidden += hidden_seconds
    last_stage = len(layout.stage_blocks) - 1
    compute_by_stage = [
        [block_count * block_seconds for block_count in layout.stage_blocks] for block_seconds in compute
    ]
    communication_by_stage = [
        [block_count * block_seconds for block_count in layout.stage_blocks] for block_seconds in communication
    ]
    # What is outside of blocks is summed up once by tp, and gathered and reduced by zero=3 where nothing is computed yet, or any more.
    outer_all_reduce = _tp_all_reduce_seconds(layout, network)
    for part, stage in (("before", 0), ("after", last_stage)):
        for direction, phase_name in enumerate(("forward", "backward")):
            compute_by_stage[direction][stage] += _pass_time(layout, part, phase_name, constants, pass_cache).total
            communication_by_stage[direction][stage] += outer_all_reduce
    for stage in range(mesh.pp) if plan.data.shard_as_one else {0, last_stage}:
        root_seconds = _zero3_root_seconds(layout, network, stage % mesh.pp)
        for direction in range(2):
            communication_by_stage[direction][stage] += root_seconds[direction]
    for stage in range(1, len(layout.stage_blocks)):
        send_seconds = _send_seconds(layout, network, constants, stage, compute[0])
        # Forward the stage before sends, backward this one.
        communication_by_stage[0][stage - 1] += send_seconds
        communication_by_stage[1][stage] += send_seconds
    return _StageTimes(
        (compute_by_stage[0], compute_by_stage[1]), (communication_by_stage[0], communication_by_stage[1]), hidden
    )


def _send_seconds(
    layout: PlanLayout, network: Network, constants: FittedConstants, stage: int, block_forward_seconds: float
) -> float:
    """Seconds in which a stage gets what the one before gives; `block_forward_seconds`: of one block."""
    mesh = layout.plan.mesh
    if mesh.pp == 1:
        return 0.0
    # Ranks of tp hold the same between blocks, unless each has its part of the sequence.
    identical_ranks = 1 if layout.plan.tensor.sequence else mesh.tp
    size = layout.stage_input_bytes[stage] * layout.samples / layout.sequence_shards
    send_seconds = network.send_seconds(size, mesh.dp * mesh.cp * mesh.tp, mesh.pp, identical_ranks=identical_ranks)
    if layout.chunks > 1:
        # Between two chunks of its own a rank has others to compute: what it sends is under way meanwhile.
        send_seconds = max(send_seconds - constants.overlap * min(layout.stage_blocks) * block_forward_seconds, 0.0)
    return send_seconds


def _pass_time(
    layout: PlanLayout, part: str, phase: str, constants: FittedConstants, pass_cache: PassCache | None
) -> PassTime:
    """One micro-batch through a part of the model on one rank."""
    if pass_cache is None:
        return _compute_pass_time(layout, part, phase, constants)
    plan = layout.plan
    cuts = plan.mesh.tp, layout.sequence_shards, plan.tensor.placements, plan.tensor.replicated
    key = (part, phase, layout.samples, cuts, plan.mesh.ep, plan.compile, layout.model.precision)
    if key not in pass_cache:
        pass_cache[key] = _compute_pass_time(layout, part, phase, constants)
    return pass_cache[key]


def _compute_pass_time(layout: PlanLayout, part: str, phase: str, constants: FittedConstants) -> PassTime:
    sheet, stack, tp, ep = layout.sheet, layout.stack, layout.plan.mesh.tp, layout.plan.mesh.ep
    block_precision, scans_for_scale = stack.block_precision, stack.scans_for_scale
    if layout.model.precision == "fp8" and "fp8" in sheet.peaks and not block_precision:
        block_precision, scans_for_scale = (
            "fp8",
            True,
        )  # by scales of each tensor as it is: what has no such units computes in 2 bytes
    fused_fraction = constants.compiled if layout.plan.compile else 1.0
    products = attention_core = elementwise = 0.0
    ops: tuple[OperatorSummary, ...] = getattr(layout.model, part)
    for op in ops:
        if op.phase != phase:
            continue
        shards = tp if op.tp_sharded else layout.sequence_shards
        # A rank has its part of the experts, and each of these the tokens of all ranks of ep.
        samples, count = (layout.samples * ep, op.count / ep) if op.is_expert else (layout.samples, op.count)
        moved = (op.moved[0] + op.moved[1] * samples) / shards
        if op.kind == "stream":
            seconds = count * fused_fraction * (elementwise_seconds(sheet, constants, moved) + constants.launch)
            if op.in_attention_core:
                attention_core += seconds
            else:
                elementwise += seconds
            continue
        precision = compute_precision(op.dtype, layout.model.precision)
        flops = (op.flops[0] + op.flops[1] * samples) / shards
        dims = [fixed + per_sample * samples for fixed, per_sample in op.dims]
        if op.kind == "attention":
            # Forward computes 4 FLOPs for each number of a head and score; backward 10, and its scores twice (again, and their gradients).
            scores = flops / dims[3] / (4 if phase == "forward" else 5)
            attention_core += count * (
                attention_seconds(sheet, constants, precision, stack.attention_kernel, scores, flops) + constants.launch
            )
            continue
        if op.kind == "inner":
            shape = (dims[0] / shards, dims[1], dims[2], dims[3])
        elif op.kind == "convolution":
            images, in_channels, out_channels, kernel_elements, output_elements, groups = dims
            shape = (1.0, images * output_elements, out_channels, in_channels / groups * kernel_elements)
        else:
            shape = _shard_product_shape(dims, op, shards)
            if block_precision and part == "block":
                precision = block_precision
                # Both factors are read as they are and written narrow before.
                batch_size, rows, columns, inner_size = shape
                bytes_per_element = DTYPE_BYTES.get(op.dtype, 4) * (2 if scans_for_scale else 1)
                conversion_bytes = (
                    batch_size * inner_size * (rows + columns) * (bytes_per_element + PRECISION_BYTES[block_precision])
                )
                elementwise += count * fused_fraction * elementwise_seconds(sheet, constants, conversion_bytes)
        # Channels of an image lie side by side where matrix units are used.
        line_sizes = (
            (in_channels / groups, out_channels)
            if op.kind == "convolution"
            else operand_line_sizes(op.operand_layout, shape)
        )
        seconds = count * (
            product_seconds(sheet, constants, precision, shape, flops, moved, line_sizes) + constants.launch
        )
        if op.kind == "inner":
            attention_core += seconds
        else:
            products += seconds
    return PassTime(products, attention_core, elementwise)


def _shard_product_shape(dims: list[float], op: OperatorSummary, shards: int) -> tuple[float, float, float, float]:
    """The shape that one rank of tp has: of the two sides of the weight the longer is divided."""
    if shards == 1:
        return dims[0], dims[1], dims[2], dims[3]
    weight_dims = [index for index in (1, 2, 3) if not op.dims[index][1]]
    longest = max(weight_dims, key=lambda index: dims[index])
    sharded_dims = [dim / shards if index == longest else dim for index, dim in enumerate(dims)]
    return sharded_dims[0], sharded_dims[1], sharded_dims[2], sharded_dims[3]


def _recompute_seconds(plan: Plan, stack: TrainingStack, forward: PassTime) -> float:
    """Seconds of what one block computes again in backward."""
    if stack.recompute == "attention":
        return forward.attention_core
    if stack.recompute == "ops":
        return forward.products / 2 + forward.elementwise
    if stack.recompute == "alternate":
        return forward.total / 2
    if plan.recompute == "block":
        return forward.total
    return forward.elementwise if plan.recompute == "selective" else 0.0


def _tp_all_reduce_seconds(layout: PlanLayout, network: Network) -> float:
    """Ranks of tp add up what passes from block to block once."""
    return network.all_reduce_seconds(
        layout.model.block_output_bytes * layout.samples, network.group(layout.plan.mesh.tp, 1)
    )


def _tensor_parallel_seconds(
    layout: PlanLayout, network: Network, constants: FittedConstants, product_time: float
) -> float:
    """What the ranks of tp say to each other in one pass of a block."""
    exchange_seconds = layout.model.tp_all_reduces_per_pass * _tp_all_reduce_seconds(layout, network)
    return (
        max(exchange_seconds - constants.overlap * min(exchange_seconds, product_time), 0.0)
        if layout.stack.overlaps_tensor_parallel
        else exchange_seconds
    )


def _sequence_regather_seconds(
    layout: PlanLayout, network: Network, constants: FittedConstants, product_time: float
) -> float:
    """What is gathered once more in the backward of a block whose ranks of tp keep parts of the sequence: the input of each column, for
    its weight's gradient, while that of the input is computed (Korthikanti et al. 2022, 4.2.2)."""
    if layout.sequence_shards == 1:
        return 0.0
    exchange_seconds = layout.model.tp_all_reduces_per_pass * network.gather_seconds(
        layout.model.block_output_bytes * layout.samples, network.group(layout.plan.mesh.tp, 1)
    )
    return max(exchange_seconds - constants.overlap * product_time / 2, 0.0)


def _context_parallel_seconds(
    layout: PlanLayout, network: Network, constants: FittedConstants, attention_time: float
) -> float:
    """What the ranks of cp say to each other in one pass of a block: keys and values go round while attention runs."""
    mesh = layout.plan.mesh
    if mesh.cp == 1:
        return 0.0
    exchange_seconds = network.gather_seconds(
        layout.model.key_value_bytes * layout.micro_batch_size / mesh.tp, network.group(mesh.cp, mesh.tp)
    )
    return max(exchange_seconds - constants.overlap * attention_time, 0.0)


@dataclass(frozen=True, slots=True)
class _ReplicatedElements:
    """Parameters that so many data ranks hold alike, and how far apart these are."""

    elements: float
    ranks: int
    stride: int


def _by_replica_group(layout: PlanLayout, elements: float, experts: float) -> Iterator[_ReplicatedElements]:
    """`elements` parameters by who else has them: of experts each rank of ep has its own."""
    mesh = layout.plan.mesh
    if elements > experts:
        yield _ReplicatedElements(elements - experts, layout.data_ranks, mesh.tp)
    if experts:
        yield _ReplicatedElements(experts / mesh.ep, layout.data_ranks // mesh.ep, mesh.tp * mesh.ep)


def _zero_gather_seconds(layout: PlanLayout, network: Network, replicated: _ReplicatedElements, width: float) -> float:
    """Seconds to put together what ZeRO divides, or to add it up and divide it."""
    return network.gather_seconds(
        width * replicated.elements, network.group(min(layout.zero_shards, replicated.ranks), replicated.stride)
    )


def _zero3_block_seconds(layout: PlanLayout, network: Network) -> tuple[float, float]:
    """Seconds to fetch the parameters of one block for forward; and for backward, with giving its gradients away."""
    plan, model = layout.plan, layout.model
    if plan.zero < 3 or layout.zero_shards < 2 or plan.data.shard_as_one:
        return 0.0, 0.0
    gather_seconds = reduce_seconds = 0.0
    for replicated in _by_replica_group(
        layout, model.elements_per_tp_rank(1, plan.mesh.tp), model.expert_elements / plan.mesh.tp
    ):
        gather_seconds += _zero_gather_seconds(
            layout, network, replicated, layout.stack.gather_width or model.parameter_width
        )
        reduce_seconds += _zero_gather_seconds(
            layout, network, replicated, layout.message_width * model.trained_fraction
        )
    return gather_seconds, gather_seconds + (0.0 if plan.data.keep_gradients else reduce_seconds)


def _zero3_root_seconds(layout: PlanLayout, network: Network, rank: int) -> tuple[float, float]:
    """Under zero=3 the parameters outside of blocks, or all where the model is one unit, are fetched before anything is computed, and stay
    until their gradients go."""
    plan, model = layout.plan, layout.model
    if plan.zero < 3 or layout.zero_shards < 2:
        return 0.0, 0.0
    expert_elements = layout.expert_elements(rank) if plan.data.shard_as_one else 0.0
    elements = (
        layout.rank_elements(rank, shard_experts=False) if plan.data.shard_as_one else layout.outside_elements(rank)
    )
    gather_seconds = reduce_seconds = 0.0
    for replicated in _by_replica_group(layout, elements, expert_elements):
        gather_seconds += _zero_gather_seconds(layout, network, replicated, model.parameter_width)
        reduce_seconds += _zero_gather_seconds(
            layout, network, replicated, layout.message_width * model.trained_fraction
        )
    return gather_seconds, 0.0 if plan.data.keep_gradients else reduce_seconds


def _gradient_accumulation_seconds(layout: PlanLayout, constants: FittedConstants) -> float:
    """Seconds in which one block's gradients are added to those of earlier micro-batches."""
    if layout.micro_batch_count == 1:
        return 0.0
    plan, elements = (
        layout.plan,
        layout.model.elements_per_tp_rank(1, layout.plan.mesh.tp) * layout.model.trained_fraction,
    )
    if plan.zero >= 2 and not plan.data.keep_gradients:
        elements /= layout.zero_shards
    return elementwise_seconds(
        layout.sheet, constants, elements * (2 * layout.gradient_width + layout.model.parameter_width)
    )


def _exchange_seconds(
    layout: PlanLayout, network: Network, constants: FittedConstants, last_backward_seconds: float
) -> tuple[float, float]:
    """(exposed, hidden) seconds of what the data ranks exchange beside blocks; `last_backward_seconds`: of the last stage's backward of a micro-batch.

    Without ZeRO gradients are added up once a step. zero=1 gives each rank its part of the sums once, zero=2 after every micro-batch
    (unless gradients are kept), and then everybody fetches the new parameters.
    """
    plan, mesh, model, stack = layout.plan, layout.plan.mesh, layout.model, layout.stack
    fullest_rank = max(layout.pp_ranks, key=layout.rank_elements)
    reduce_seconds = gather_seconds = 0.0
    for replicated in _by_replica_group(
        layout, layout.rank_elements(fullest_rank, shard_experts=False), layout.expert_elements(fullest_rank)
    ):
        width = layout.message_width * model.trained_fraction
        shards = min(layout.zero_shards, replicated.ranks)
        cross_shard_seconds = network.all_reduce_seconds(
            width * replicated.elements / shards, network.group(replicated.ranks // shards, replicated.stride * shards)
        )
        if plan.zero == 0:
            reduce_seconds += network.all_reduce_seconds(
                width * replicated.elements, network.group(replicated.ranks, replicated.stride)
            )
        elif plan.zero == 3:
            reduce_seconds += cross_shard_seconds + (
                _zero_gather_seconds(layout, network, replicated, width) if plan.data.keep_gradients else 0.0
            )
        else:
            reduce_seconds += cross_shard_seconds + _zero_gather_seconds(layout, network, replicated, width)
            gather_seconds += _zero_gather_seconds(
                layout, network, replicated, stack.gather_width or model.parameter_width
            )
    exchanges_per_step = layout.micro_batch_count if plan.zero == 2 and not plan.data.keep_gradients else 1
    # One unit has all its gradients when backward is done.
    overlaps = (
        stack.overlaps_data_parallel
        and (mesh.pp == 1 or stack.overlaps_in_pipeline)
        and not (plan.zero and plan.data.shard_as_one)
    )
    hidden = exchanges_per_step * min(reduce_seconds, last_backward_seconds * constants.overlap) if overlaps else 0.0
    return exchanges_per_step * reduce_seconds - hidden + gather_seconds + _tied_gradient_seconds(
        layout, network
    ) + _full_tensor_seconds(layout, network), hidden


def _full_tensor_seconds(layout: PlanLayout, network: Network) -> float:
    """Optimizers that need whole tensors: gradients and values go to the owners, values come back."""
    model, seconds = layout.model, 0.0
    trained_elements = (
        model.elements[0] + model.layers * model.elements[1] + model.elements[2]
    ) * model.trained_fraction
    for fraction, reads, draws in model.full_tensor_optimizers:
        owned_tensors = find_owned_tensors(layout.plan, reads, draws)
        if owned_tensors is not None:
            size = fraction * owned_tensors.fraction * trained_elements * model.parameter_width
            seconds += TRANSFERS_PER_STEP * network.gather_seconds(size, network.group(owned_tensors.ranks, 1))
    return seconds


def _tied_gradient_seconds(layout: PlanLayout, network: Network) -> float:
    """The first and the last stage add up the gradients of what they share."""
    mesh = layout.plan.mesh
    if mesh.pp == 1:
        return 0.0
    size = layout.message_width * layout.model.tied_elements / mesh.tp
    return network.all_reduce_seconds(size, network.group(2, (mesh.pp - 1) * layout.data_ranks * mesh.tp))


def _optimizer_seconds(layout: PlanLayout, constants: FittedConstants) -> float:
    """Seconds of the update: gradients, states both ways, parameters (of which a wide copy is the state); clipping reads and writes
    gradients besides."""
    plan, model = layout.plan, layout.model
    updated_elements = (
        max((layout.shard_elements if plan.zero else layout.rank_elements)(rank) for rank in layout.pp_ranks)
        * model.trained_fraction
    )
    trained_elements = (
        model.elements[0] + model.layers * model.elements[1] + model.elements[2]
    ) * model.trained_fraction
    for fraction, reads, draws in model.full_tensor_optimizers:
        owned_tensors = find_owned_tensors(plan, reads, draws)
        updated_elements += (
            fraction * (owned_tensors.fraction * trained_elements - updated_elements)
            if owned_tensors is not None
            else 0.0
        )
    bytes_per_element = (
        layout.gradient_width
        + 2 * layout.optimizer_state_bytes
        + model.parameter_width * (1 if layout.has_master_weights else 2)
    )
    if model.clips_gradients:
        bytes_per_element += 3 * layout.gradient_width
    return elementwise_seconds(layout.sheet, constants, bytes_per_element * updated_elements)
