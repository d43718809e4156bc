"""The model as one rank of the tensor and pipeline axes has it: a smaller profile, priced like any other.

What a rank holds is exact: parameters by their names, as placements and stages divide them. What it computes and keeps goes by the
modules: those of its stages, and a share of what tp cuts and of what lies between a column and its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from echelon.plan.placement import cuts_by_parameter
from echelon.plan.plan import Plan
from echelon.plan.profile import Amount, MemorySnapshot, Operator, ParameterProfile, Profile, fold_path
from echelon.simulator.pipeline_schedule import in_flight_micro_batches
from echelon.simulator.rank_shares import RankShares, is_within
from echelon.simulator.recomputation import RecomputedBlocks, own_saved_bytes, recomputed_block_bytes


@dataclass(frozen=True, slots=True)
class RankProfile:
    """What a rank has of the model, and what it keeps beside the micro-batch at work."""

    profile: Profile
    #: Bytes of micro-batches that wait for their backward, and of what each of them gave to the next stage.
    in_flight_bytes: float = 0.0
    #: Bytes that a block computes in forward and gives back at once: an allocator may hold on to them.
    freed_bytes: float = 0.0


def rank_profiles(profile: Profile, plan: Plan, micro_batch_sizes: tuple[int, ...]) -> tuple[RankProfile, ...]:
    """What each rank of pp has, of tp the rank that holds most. `micro_batch_sizes`: samples of each micro-batch."""
    if plan.mesh.tp == plan.mesh.pp == 1 and plan.recompute == "none":
        return (RankProfile(profile),)
    shares = RankShares(profile, plan)
    return tuple(_rank_profile(profile, plan, shares, rank, micro_batch_sizes) for rank in range(plan.mesh.pp))


def _rank_profile(
    profile: Profile, plan: Plan, shares: RankShares, rank: int, micro_batch_sizes: tuple[int, ...]
) -> RankProfile:
    parameters = tuple(_rank_parameters(profile, plan, shares, rank))
    trained_elements = sum(parameter.elements for parameter in parameters if parameter.trainable)
    trained_fraction = trained_elements / max(
        sum(parameter.elements for parameter in profile.parameters if parameter.trainable), 1
    )
    unit_sizes = [(path, _bytes_within(parameters, path)) for path in profile.fsdp_units]
    held_units = [(path, size) for path, size in unit_sizes if size]
    gradient_fraction = sum(parameter.bytes for parameter in parameters if parameter.trainable) / max(
        profile.gradient_bytes, 1
    )
    saved = _saved_activations(profile, plan, shares, rank, max(micro_batch_sizes))
    rank_profile = replace(
        profile,
        parameters=parameters,
        operators=tuple(_rank_operators(profile, shares, rank)),
        moments=_rank_snapshots(profile, parameters, shares, rank, max(micro_batch_sizes), saved, gradient_fraction),
        optimizers=tuple(
            replace(
                optimizer,
                state_bytes=int(optimizer.state_bytes * trained_fraction),
                temporary_bytes=int(optimizer.temporary_bytes * trained_fraction),
                trainable_elements=int(optimizer.trainable_elements * trained_fraction),
            )
            for optimizer in profile.optimizers
        ),
        fsdp_units=tuple(path for path, _ in held_units),
        fsdp_unit_bytes=tuple(size for _, size in held_units),
    )
    in_flight = in_flight_micro_batches(plan, len(micro_batch_sizes), rank)
    return RankProfile(
        rank_profile,
        (in_flight - 1) * saved.bytes + in_flight * shares.sent_bytes(profile, rank, max(micro_batch_sizes)),
        saved.freed_bytes,
    )


def _rank_parameters(profile: Profile, plan: Plan, shares: RankShares, rank: int) -> Iterator[ParameterProfile]:
    cuts_by_name = cuts_by_parameter(plan.tensor.placements)
    for parameter in profile.parameters:
        names = (parameter.name, *parameter.aliases)
        owners = {
            owner
            for unit, owner in zip(profile.pipeline_units, shares.unit_ranks, strict=False)
            if any(is_within(name, unit.path) for name in names)
        }
        if shares.unit_ranks and owners and rank not in owners:
            continue
        cut = next((cuts_by_name[name] for name in names if name in cuts_by_name), None)
        if cut is None:
            yield parameter
            continue
        placement, tensor_slice = cut
        yield replace(parameter, shape=tensor_slice.largest_shard_shape(parameter.shape, plan.mesh.tp, placement.unit))


def _bytes_within(parameters: tuple[ParameterProfile, ...], path: str) -> int:
    return sum(parameter.bytes for parameter in parameters if is_within(parameter.name, path))


def _rank_operators(profile: Profile, shares: RankShares, rank: int) -> Iterator[Operator]:
    for operator in profile.operators:
        calls = operator.count * shares.stage_share(operator.module, rank)
        if not calls:
            continue
        count = max(round(calls), 1)
        factor = shares.compute_share(operator.module, rank) * operator.count / count
        yield replace(operator, count=count, flops=operator.flops * factor, moved=operator.moved * factor)


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """What a rank keeps for the backward of one micro-batch."""

    bytes: float
    share: float  #: of what the whole model keeps
    #: While the last block is computed again, and while the first is: what that makes, and what is kept until then.
    last_block_bytes: float = 0.0
    first_block_bytes: float = 0.0
    freed_bytes: float = 0.0  #: what a block made in forward and gave back


def _saved_activations(profile: Profile, plan: Plan, shares: RankShares, rank: int, samples: int) -> SavedActivations:
    recomputed_blocks = {fold_path(path) for path in profile.fsdp_units} if plan.recompute != "none" else set()
    own_bytes = own_saved_bytes(profile, samples)
    module_total, model_total = sum(own_bytes.values()), profile.saved_bytes(samples)
    loss_bytes = max(model_total - module_total, 0.0)  # kept outside of all modules: at the loss
    outside_bytes, bytes_before_blocks, in_blocks = loss_bytes * shares.stage_share("", rank), 0.0, False
    for path, size in own_bytes.items():
        if any(is_within(path, block) for block in recomputed_blocks):
            in_blocks = True
            continue
        outside_bytes += size * shares.saved_share(path, rank)
        bytes_before_blocks += 0.0 if in_blocks or not path else size * shares.saved_share(path, rank)
    blocks = recomputed_block_bytes(profile, plan, shares, rank, samples) if recomputed_blocks else RecomputedBlocks()
    rank_bytes, scale = (
        outside_bytes + blocks.saved,
        model_total / (module_total + loss_bytes) if module_total + loss_bytes else 0.0,
    )
    return SavedActivations(
        min(scale * rank_bytes, model_total),
        min(rank_bytes / (module_total + loss_bytes), 1.0) if module_total + loss_bytes else 0.0,
        scale * (bytes_before_blocks + blocks.saved + blocks.largest_recomputed) if blocks.saved else 0.0,
        scale * (bytes_before_blocks + blocks.saved_per_block + blocks.largest_recomputed) if blocks.saved else 0.0,
        scale * blocks.largest_recomputed,
    )


def _rank_snapshots(
    profile: Profile,
    parameters: tuple[ParameterProfile, ...],
    shares: RankShares,
    rank: int,
    samples: int,
    saved: SavedActivations,
    gradient_fraction: float,
) -> tuple[MemorySnapshot, ...]:
    """The moments that fall to a rank, which has the parameters `parameters`; `gradient_fraction`: its share of them."""
    snapshots = [
        replace(
            snapshot,
            alive=snapshot.alive + snapshot.saved * (saved.share - 1),
            saved=snapshot.saved * saved.share,
            gradients=snapshot.gradients * gradient_fraction,
        )
        for snapshot in profile.moments
        if shares.stage_share(snapshot.module.partition(" ")[0].replace("loss", ""), rank)
    ]
    stage_units = [
        unit.path for unit, owner in zip(profile.pipeline_units, shares.unit_ranks, strict=False) if owner == rank
    ]
    if saved.last_block_bytes:  # what the loss and the layers after the blocks kept is gone by then
        block_units = [path for path in profile.fsdp_units if not stage_units or path in stage_units]
        snapshots.append(
            _backward_snapshot(
                profile, parameters, shares, rank, samples, block_units, block_units[-1], saved.last_block_bytes
            )
        )
        snapshots.append(
            _backward_snapshot(
                profile, parameters, shares, rank, samples, block_units, block_units[0], saved.first_block_bytes
            )
        )
    elif shares.unit_ranks and rank != shares.loss_rank:  # the profile's peaks are at the loss
        snapshots.append(
            _backward_snapshot(profile, parameters, shares, rank, samples, stage_units, stage_units[-1], saved.bytes)
        )
    return tuple(snapshots)


def _backward_snapshot(
    profile: Profile,
    parameters: tuple[ParameterProfile, ...],
    shares: RankShares,
    rank: int,
    samples: int,
    units: list[str],
    unit: str,
    saved_bytes: float,
) -> MemorySnapshot:
    """Backward of one of `units`: beside what is kept, the gradients of what it gave, of the largest activation and of a weight."""
    unit_paths = {fold_path(path) for path in units}
    modules = [
        module for module in profile.modules if any(is_within(fold_path(module.path), path) for path in unit_paths)
    ]
    output_bytes = max(
        (module.output.at(samples) for module in modules if fold_path(module.path) in unit_paths), default=0.0
    )
    largest_activation = max(
        (module.output.at(samples) * shares.output_share(module.path) for module in modules), default=0.0
    )
    largest_weight = max(
        (
            parameter.bytes
            for parameter in parameters
            if any(is_within(fold_path(parameter.name), path) for path in unit_paths)
        ),
        default=0,
    )
    last_index = max(
        (index for index, parameter in enumerate(parameters) if is_within(parameter.name, unit)),
        default=len(parameters),
    )
    return MemorySnapshot(
        module=unit,
        phase="backward",
        alive=Amount(saved_bytes + output_bytes + largest_activation + largest_weight),
        saved=Amount(saved_bytes),
        gradients=float(sum(parameter.bytes for parameter in parameters[last_index + 1 :] if parameter.trainable)),
    )
