"""What is computed again in backward, and what its blocks keep until then."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.plan.plan import Plan
from echelon.plan.profile import WIDTH, Operator, Profile, fold_path
from echelon.plan.recompute_policy import keeps
from echelon.simulator.rank_shares import Shares, inside

#: Operators whose backward needs nothing that they read or gave.
_SUMS = ("add", "add_")


def forward_in_blocks(whole: Profile, profile: Profile) -> list[Operator]:
    """The forward operators of `profile` that lie in repeated blocks of the whole model."""
    blocks = {fold_path(path) for path in whole.units}
    forward = [operator for operator in profile.operators if operator.phase == "forward"]
    return [operator for operator in forward if any(inside(operator.module, block) for block in blocks)]


def saved(profile: Profile, plan: Plan) -> list[Operator]:
    """The operators in blocks whose outputs are kept until backward."""
    if plan.recompute != "selective":
        return []
    # What a row gives is summed over the ranks in place, so that there is nothing of it to keep.
    rows = {fold_path(each.path) for each in plan.placements if each.cut == "row"}
    inner = forward_in_blocks(profile, profile)
    return [each for each in inner if keeps(each.name) and each.module not in rows]


def computed_again(whole: Profile, profile: Profile, plan: Plan) -> list[Operator]:
    """The operators of `profile` that run once more in backward.

    torch stops as soon as it has all that backward needs: a product that ends a block needs what it reads, not what it gives.
    """
    if plan.recompute == "none":
        return []
    found, kept = [], {(each.module, each.name) for each in saved(whole, plan)}
    for block in dict.fromkeys(map(fold_path, whole.units)):
        inner = [each for each in forward_in_blocks(whole, profile) if inside(each.module, block)]
        while inner and inner[-1].name in _SUMS:
            inner.pop()
        if inner and inner[-1].kind != "stream":
            inner.pop()
        found += [each for each in inner if (each.module, each.name) not in kept]
    return found


def output_bytes(operator: Operator, samples: int) -> float:
    """What one call of a product or an attention gives."""
    dims = [amount.at(samples) for amount in operator.dims]
    width = WIDTH.get(operator.dtype, 4)
    if operator.kind == "convolution":
        count, _, channels, _, spatial, _ = dims
        return count * channels * spatial * width
    lots, first, second, last = dims
    if operator.kind == "attention":
        return lots * first * (last * width + 4)  # and of each query the scores' logarithm, in float32
    return lots * first * second * width


@dataclass(frozen=True, slots=True)
class Blocks:
    """Bytes of blocks that are computed again: what all of them and one of them keep until then, and what the largest makes while it is."""

    kept: float = 0.0
    one: float = 0.0
    largest: float = 0.0


def blocks_again(profile: Profile, plan: Plan, shares: Shares, rank: int, samples: int) -> Blocks:
    """What the blocks on a rank keep and make."""
    own = own_kept(profile, samples)
    sizes = [
        (
            each.module,
            each.count * output_bytes(each, samples) * shares.staged(each.module, rank) * shares.cut(each.module),
        )
        for each in saved(profile, plan)
    ]
    kept, one, largest = sum(size for _, size in sizes), 0.0, 0.0
    for block in {fold_path(path) for path in profile.units}:
        alike = [module for module in profile.modules if fold_path(module.path) == block]
        here, count = shares.staged(block, rank), sum(module.count for module in alike)
        if not here or not count:
            continue
        # The input of a block is as large as its output.
        kept += here * sum(module.count * module.output.at(samples) for module in alike)
        inner = {path: size for path, size in own.items() if inside(path, block)}
        # Of what a block keeps when nothing is computed again, the part that this rank has.
        part = sum(size * shares.kept(path, rank) for path, size in inner.items()) / (sum(inner.values()) or 1.0) / here
        known = sum(size for path, size in sizes if inside(path, block)) / (count * here)
        for module in alike:
            given = module.output.at(samples)
            largest = max(largest, module.kept.at(samples) * part - known - given)
            one = max(one, known + given)
    return Blocks(kept, one, largest)


def own_kept(profile: Profile, samples: int) -> dict[str, float]:
    """Bytes that all modules of a folded path keep, those of the modules in them left out."""
    totals: dict[str, float] = {}
    for module in profile.modules:
        path = fold_path(module.path)
        totals[path] = totals.get(path, 0.0) + module.count * module.kept.at(samples)
    own = dict(totals)
    for path, size in totals.items():
        outer = path
        while outer:
            outer = outer.rpartition(".")[0]
            if outer in totals:
                own[outer] -= size
                break
    return {path: max(size, 0.0) for path, size in own.items()}
