"""Communication of a step: tp, cp and ep in every pass, ZeRO over dp, sends between stages, tied weights, and optimizers on full tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from echelon.plan.gradient_buckets import assign_buckets
from echelon.plan.profile import Phase
from echelon.simulator.compute import PassTime, PlacedPlan
from echelon.simulator.cost.cost_model import Exchange, RankGroup
from echelon.simulator.model_summary import Collective, PartName, TPMessage
from echelon.simulator.plan_layout import PlanLayout
from echelon.simulator.whole_tensor_cost import TRANSFERS_PER_STEP


def tp_seconds(placed: PlacedPlan, part: PartName, phase: Phase, samples: float) -> float:
    """Collectives of tp in one pass of a part, without those that recomputation repeats."""
    messages = placed.layout.part(part).tp_messages
    return sum(_message_seconds(placed, message, samples) for message in messages if message.phase == phase)


def block_seconds(placed: PlacedPlan, forward: PassTime, backward: PassTime, samples: float) -> tuple[float, float]:
    """Exposed communication of one block over tp, cp and ep: (in forward, in backward with recomputation)."""
    layout, cost, stack = placed.layout, placed.cost, placed.layout.stack
    mesh = layout.plan.mesh

    def exposed_tp(seconds: float) -> float:
        # Products overlap with the collectives that they feed.
        hidden = cost.overlap * min(seconds, forward.products) if stack.overlaps_tensor_parallel else 0.0
        return max(seconds - hidden, 0.0)

    tp_forward = exposed_tp(tp_seconds(placed, "block", "forward", samples))
    tp_backward = exposed_tp(tp_seconds(placed, "block", "backward", samples))
    tp_again = exposed_tp(
        sum(
            _message_seconds(placed, message, samples)
            for message in layout.model.block.tp_messages
            if _is_repeated(layout, message)
        )
    )
    # Keys and values circulate while attention runs.
    context = 0.0
    if mesh.cp > 1:
        size = layout.model.key_value_bytes * samples * mesh.cp / mesh.tp
        context = cost.message_seconds("all_gather", size, RankGroup(mesh.cp, mesh.tp))
        context -= cost.hidden_seconds(context, forward.attention_core)
    # Tokens are sent to their experts and back.
    routed = layout.model.routed_bytes * samples / layout.sequence_shards
    experts = 2 * cost.message_seconds("all_to_all", routed, RankGroup(mesh.ep, mesh.tp)) if mesh.ep > 1 else 0.0
    experts_again = experts if layout.recompute == "block" else 0.0
    return (
        tp_forward + context + experts,
        tp_backward + tp_again + experts + experts_again + 2 * context + _regather_seconds(placed, backward, samples),
    )


def _message_seconds(placed: PlacedPlan, message: TPMessage, samples: float) -> float:
    group = RankGroup(placed.layout.plan.mesh.tp)
    return message.count * placed.cost.message_seconds(message.collective, message.size.at(samples), group)


def _is_repeated(layout: PlanLayout, message: TPMessage) -> bool:
    """Whether backward repeats a message of a block's forward."""
    if message.phase == "backward" or (message.ends_block and layout.stack.stops_recompute_early):
        return False
    return layout.recompute == "block" or (layout.recompute == "selective" and message.is_row_sum)


def _regather_seconds(placed: PlacedPlan, backward: PassTime, samples: float) -> float:
    """With a sharded sequence, backward gathers the input of columns again for the gradient of their weight, while it computes the gradient
    of that input (Korthikanti et al. 2022, 4.2.2)."""
    layout, cost = placed.layout, placed.cost
    if layout.sequence_shards == 1:
        return 0.0
    seconds = sum(
        message.count * cost.message_seconds("all_gather", message.size.at(samples), RankGroup(layout.plan.mesh.tp))
        for message in layout.model.block.tp_messages
        if message.is_row_sum
    )
    return seconds - cost.hidden_seconds(seconds, backward.products / 2)


def send_seconds(placed: PlacedPlan, stage: int, block_forward_seconds: float, samples: float) -> float:
    """Sending the previous stage's output to a stage. `block_forward_seconds`: computation of one block."""
    layout, cost, mesh = placed.layout, placed.cost, placed.layout.plan.mesh
    if mesh.pp == 1:
        return 0.0
    # Between blocks, ranks of tp hold the same tensor unless each has a shard of the sequence.
    identical_ranks = 1 if layout.plan.tensor.sequence else mesh.tp
    size = layout.stage_input_bytes[stage] * samples / layout.sequence_shards
    seconds = cost.send_seconds(size, mesh.dp * mesh.cp * mesh.tp, mesh.pp, identical_ranks=identical_ranks)
    if layout.chunks > 1:  # a rank computes another of its chunks in the meantime
        seconds -= cost.hidden_seconds(seconds, min(layout.stage_blocks) * block_forward_seconds)
    return seconds


@dataclass(frozen=True, slots=True)
class _Replicas:
    """Parameters that are replicated over a group of data ranks."""

    elements: float
    group: RankGroup


def _replicas(layout: PlanLayout, elements: float, experts: float) -> Iterator[_Replicas]:
    """`elements` parameters by the group that replicates them: of `experts` elements each rank of ep has its own."""
    mesh = layout.plan.mesh
    if elements > experts:
        yield _Replicas(elements - experts, RankGroup(layout.data_ranks, mesh.tp))
    if experts:
        yield _Replicas(experts / mesh.ep, RankGroup(layout.data_ranks // mesh.ep, mesh.tp * mesh.ep))


def _zero_exchange(placed: PlacedPlan, collective: Collective, replicas: _Replicas, width: float) -> Exchange:
    """All-gather or reduce-scatter of what ZeRO shards. `width`: bytes per element."""
    layout, group = placed.layout, replicas.group
    size = width * replicas.elements
    shards = RankGroup(min(layout.zero_shards, group.ranks), group.stride)
    return placed.cost.exchange(collective, size, shards, _unit_messages(layout, size, width))


def _unit_messages(layout: PlanLayout, size: float, width: float) -> Iterator[float]:
    """`size` bytes as ZeRO sends them: one message per block, and one for the rest."""
    block = 0.0 if layout.plan.data.shard_as_one else width * layout.block_elements
    while 0 < block < size:
        yield block
        size -= block
    yield size


def zero3_block_seconds(placed: PlacedPlan) -> tuple[float, float]:
    """Under zero=3: (gathering the parameters of one block for forward, the same for backward with scattering its gradients)."""
    layout = placed.layout
    plan, width = layout.plan, layout.stack.gather_width or layout.model.parameter_width
    if plan.zero < 3 or layout.zero_shards < 2 or plan.data.shard_as_one:
        return 0.0, 0.0
    gather, scatter = _gather_and_scatter(placed, layout.block_elements, layout.block_expert_elements, width)
    return gather, gather + (0.0 if plan.data.keep_gradients else scatter)


def zero3_root_seconds(placed: PlacedPlan, rank: int) -> tuple[float, float]:
    """Under zero=3, the same for parameters outside of blocks, or for a model that is one FSDP unit: gathered before forward, and held until
    the gradients are scattered."""
    layout = placed.layout
    plan = layout.plan
    if plan.zero < 3 or layout.zero_shards < 2:
        return 0.0, 0.0
    whole = plan.data.shard_as_one
    elements = layout.rank_elements(rank, shard_experts=False) if whole else layout.outside_elements(rank)
    experts = layout.expert_elements(rank) if whole else 0.0
    gather, scatter = _gather_and_scatter(placed, elements, experts, layout.model.parameter_width)
    return gather, 0.0 if plan.data.keep_gradients else scatter


def _gather_and_scatter(placed: PlacedPlan, elements: float, experts: float, width: float) -> tuple[float, float]:
    gather = scatter = 0.0
    for replicas in _replicas(placed.layout, elements, experts):
        gather += _zero_exchange(placed, "all_gather", replicas, width).seconds
        scatter += _zero_exchange(placed, "reduce_scatter", replicas, placed.layout.message_width).seconds
    return gather, scatter


def data_parallel_seconds(placed: PlacedPlan, backward: float) -> tuple[float, float]:
    """(exposed, hidden) seconds of the data ranks' exchange around the passes of a step. `backward`: computation of the last stage's backward
    for one micro-batch.

    | zero | per step, unless stated otherwise |
    |---|---|
    | 0 | an all-reduce of the gradients, in buckets |
    | 1 | a reduce-scatter of the gradients, an all-gather of the parameters |
    | 2 | a reduce-scatter per micro-batch (per step if gradients are kept), an all-gather |
    | 3 | a reduce-scatter if gradients are kept; the rest happens in the passes |

    Where a sharding group is smaller than dp, the groups sum their shards.
    """
    layout, cost = placed.layout, placed.cost
    plan, model, stack = layout.plan, layout.model, layout.stack
    rank = max(layout.pp_ranks, key=layout.rank_elements)
    elements, experts = layout.rank_elements(rank, shard_experts=False), layout.expert_elements(rank)
    width, gather_width = layout.message_width, stack.gather_width or model.parameter_width
    reduce, gather = Exchange(), Exchange()
    for replicas in _replicas(layout, elements, experts):
        size, group = width * replicas.elements, replicas.group
        if plan.zero == 0:
            reduce += cost.exchange("all_reduce", size, group, bucket_messages(layout, size))
            continue
        shards = min(layout.zero_shards, group.ranks)
        across = RankGroup(group.ranks // shards, group.stride * shards)
        reduce += cost.exchange("all_reduce", size / shards, across, (size / shards,))
        if plan.zero < 3 or plan.data.keep_gradients:
            reduce += _zero_exchange(placed, "reduce_scatter", replicas, width)
        if plan.zero < 3:
            gather += _zero_exchange(placed, "all_gather", replicas, gather_width)
    exchanges = layout.micro_batches if plan.zero == 2 and not plan.data.keep_gradients else 1
    # A model that is one FSDP unit has no gradient before the end of backward.
    overlaps = (
        stack.overlaps_data_parallel
        and (plan.mesh.pp == 1 or stack.overlaps_in_pipeline)
        and not (plan.zero and plan.data.shard_as_one)
    )
    hidden = exchanges * cost.hidden_seconds(reduce.overlappable, backward) if overlaps else 0.0
    exposed = exchanges * reduce.seconds - hidden + gather.seconds
    return exposed + _hook_seconds(placed, rank) + _tied_seconds(placed) + _full_tensor_seconds(placed), hidden


def bucket_messages(layout: PlanLayout, size: float) -> Iterator[float]:
    """Gradients of `size` bytes in the engine's buckets, in the order of their exchange."""
    tensors = layout.model.trained_tensors
    scale = size / max(sum(tensor_bytes for tensor_bytes, _ in tensors), 1)
    scaled = [(round(tensor_bytes * scale), dtype) for tensor_bytes, dtype in tensors]
    for bucket in assign_buckets(scaled, layout.plan.data.bucket_megabytes):
        yield sum(scaled[position][0] for position in bucket)


def _hook_seconds(placed: PlacedPlan, rank: int) -> float:
    layout, plan = placed.layout, placed.layout.plan
    if not plan.zero or layout.zero_shards < 2:
        return 0.0
    units = 1 if plan.data.shard_as_one else layout.held_blocks(rank) + 1
    return placed.cost.hook_seconds(2 * layout.micro_batches * units)


def _tied_seconds(placed: PlacedPlan) -> float:
    """The first and the last stage sum the gradients of the parameters that both use."""
    layout, mesh = placed.layout, placed.layout.plan.mesh
    if mesh.pp == 1:
        return 0.0
    size = layout.message_width * layout.model.tied_elements / mesh.tp
    return placed.cost.message_seconds("all_reduce", size, RankGroup(2, (mesh.pp - 1) * layout.data_ranks * mesh.tp))


def _full_tensor_seconds(placed: PlacedPlan) -> float:
    """Optimizers on full tensors: gradients and values go to their owners, values return."""
    layout, model, seconds = placed.layout, placed.layout.model, 0.0
    for _, share, owned in layout.optimizers():
        if owned is not None:
            size = share * owned.fraction * model.trained_elements * model.parameter_width
            seconds += TRANSFERS_PER_STEP * placed.cost.message_seconds("all_gather", size, RankGroup(owned.ranks))
    return seconds
