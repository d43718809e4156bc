"""What is computed again in backward, and what its blocks keep until then."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.plan.plan import Plan
from echelon.plan.profile import DTYPE_BYTES, Operator, Profile, fold_path
from echelon.plan.recompute_policy import saves_output
from echelon.simulator.rank_shares import RankShares, is_within

#: Operators whose backward needs nothing that they read or gave.
_ADDITIONS = ("add", "add_")


def block_forward_operators(full_profile: Profile, profile: Profile) -> list[Operator]:
    """The forward operators of `profile` that lie in repeated blocks of the whole model."""
    blocks = {fold_path(path) for path in full_profile.fsdp_units}
    forward_operators = [operator for operator in profile.operators if operator.phase == "forward"]
    return [operator for operator in forward_operators if any(is_within(operator.module, block) for block in blocks)]


def saved_operators(profile: Profile, plan: Plan) -> list[Operator]:
    """The operators in blocks whose outputs are kept until backward."""
    if plan.recompute != "selective":
        return []
    # What a row gives is summed over the ranks in place, so that there is nothing of it to keep.
    row_modules = {fold_path(each.path) for each in plan.tensor.placements if each.cut == "row"}
    block_operators = block_forward_operators(profile, profile)
    return [each for each in block_operators if saves_output(each.name) and each.module not in row_modules]


def recomputed_operators(full_profile: Profile, profile: Profile, plan: Plan) -> list[Operator]:
    """The operators of `profile` that run once more in backward.

    torch stops as soon as it has all that backward needs: a product that ends a block needs what it reads, not what it gives.
    """
    if plan.recompute == "none":
        return []
    recomputed, saved = [], {(operator.module, operator.name) for operator in saved_operators(full_profile, plan)}
    for block in dict.fromkeys(map(fold_path, full_profile.fsdp_units)):
        block_operators = [
            operator for operator in block_forward_operators(full_profile, profile) if is_within(operator.module, block)
        ]
        while block_operators and block_operators[-1].name in _ADDITIONS:
            block_operators.pop()
        if block_operators and block_operators[-1].kind != "stream":
            block_operators.pop()
        recomputed += [operator for operator in block_operators if (operator.module, operator.name) not in saved]
    return recomputed


def output_bytes(operator: Operator, samples: int) -> float:
    """What one call of a product or an attention gives."""
    dims = [amount.at(samples) for amount in operator.dims]
    dtype_bytes = DTYPE_BYTES.get(operator.dtype, 4)
    if operator.kind == "convolution":
        image_count, _, out_channels, _, output_elements, _ = dims
        return image_count * out_channels * output_elements * dtype_bytes
    batch_size, rows, columns, head_dim = dims
    if operator.kind == "attention":
        return batch_size * rows * (head_dim * dtype_bytes + 4)  # and of each query the scores' logarithm, in float32
    return batch_size * rows * columns * dtype_bytes


@dataclass(frozen=True, slots=True)
class RecomputedBlocks:
    """Bytes of blocks that are computed again: what all of them and one of them keep until then, and what the largest makes while it is."""

    saved: float = 0.0
    saved_per_block: float = 0.0
    largest_recomputed: float = 0.0


def recomputed_block_bytes(
    profile: Profile, plan: Plan, shares: RankShares, rank: int, samples: int
) -> RecomputedBlocks:
    """What the blocks on a rank keep and make."""
    own_bytes = own_saved_bytes(profile, samples)
    output_sizes = [
        (
            operator.module,
            operator.count
            * output_bytes(operator, samples)
            * shares.stage_share(operator.module, rank)
            * shares.output_share(operator.module),
        )
        for operator in saved_operators(profile, plan)
    ]
    saved_total, largest_saved, largest_recomputed = sum(size for _, size in output_sizes), 0.0, 0.0
    for block in {fold_path(path) for path in profile.fsdp_units}:
        matching_modules = [module for module in profile.modules if fold_path(module.path) == block]
        stage_share, count = shares.stage_share(block, rank), sum(module.count for module in matching_modules)
        if not stage_share or not count:
            continue
        # The input of a block is as large as its output.
        saved_total += stage_share * sum(module.count * module.output.at(samples) for module in matching_modules)
        inner_bytes = {path: size for path, size in own_bytes.items() if is_within(path, block)}
        # Of what a block keeps when nothing is computed again, the part that this rank has.
        rank_share = (
            sum(size * shares.saved_share(path, rank) for path, size in inner_bytes.items())
            / (sum(inner_bytes.values()) or 1.0)
            / stage_share
        )
        saved_outputs = sum(size for path, size in output_sizes if is_within(path, block)) / (count * stage_share)
        for module in matching_modules:
            block_output = module.output.at(samples)
            largest_recomputed = max(
                largest_recomputed, module.saved.at(samples) * rank_share - saved_outputs - block_output
            )
            largest_saved = max(largest_saved, saved_outputs + block_output)
    return RecomputedBlocks(saved_total, largest_saved, largest_recomputed)


def own_saved_bytes(profile: Profile, samples: int) -> dict[str, float]:
    """Bytes that all modules of a folded path keep, those of the modules in them left out."""
    totals: dict[str, float] = {}
    for module in profile.modules:
        path = fold_path(module.path)
        totals[path] = totals.get(path, 0.0) + module.count * module.saved.at(samples)
    own_bytes = dict(totals)
    for path, size in totals.items():
        ancestor = path
        while ancestor:
            ancestor = ancestor.rpartition(".")[0]
            if ancestor in totals:
                own_bytes[ancestor] -= size
                break
    return {path: max(size, 0.0) for path, size in own_bytes.items()}
