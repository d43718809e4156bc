"""Reduce tensors to two numbers, so that ranks can compare large ones without sending them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.verifier.compare import FLOAT64_BOUND, NOT_COMPARABLE, RELATIVE_FLOOR, Difference, has_fractions


@dataclass(frozen=True, slots=True)
class TensorChecksum:
    """A tensor's shape, its 2-norm, and its product with fixed weights to which no tensor is likely to be orthogonal. Infinities count in
    `infinities` alone: the product of the weights with 1 or -1 in their places. NaN is in the norm. Integers have a product alone, which is
    exact."""

    shape: tuple[int, ...]
    norm: float
    product: float | int
    infinities: float = 0.0

    @property
    def has_nan(self) -> bool:
        return math.isnan(self.norm)

    def relative_difference(self, reference: TensorChecksum, floor: float = 0.0) -> float:
        """About |a - b| / |b|, with |b| no less than `floor`: the weights are about one with random signs. NaN is not comparable, even on both
        sides; infinities must be in the same places."""
        if self.shape != reference.shape or self.has_nan or reference.has_nan:
            return NOT_COMPARABLE
        if abs(self.infinities - reference.infinities) > FLOAT64_BOUND:
            return NOT_COMPARABLE
        if self == reference:
            return 0.0
        if isinstance(reference.product, int):
            return 1.0  # integers have no rounding
        difference = max(abs(self.product - reference.product), abs(self.norm - reference.norm))
        scale = max(reference.norm, floor)
        value = difference / scale if scale else NOT_COMPARABLE
        return value if value < NOT_COMPARABLE else NOT_COMPARABLE  # NaN too


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """A part of a parameter or buffer: ranks with the same region hold replicas."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def extract(self, full_tensor: Tensor) -> Tensor:
        return full_tensor[tuple(slice(i, i + size) for i, size in zip(self.start, self.shape, strict=True))]


#: What each rank holds, in rank order.
RankChecksums = Sequence[Mapping[TensorRegion, TensorChecksum]]


def compute_checksum(value: Tensor, weights: Tensor | None = None) -> TensorChecksum:
    """The checksum of a tensor. `weights`: precomputed `checksum_weights` of at least as many elements."""
    flat = value.detach().reshape(-1)
    if not has_fractions(flat):
        # Weights for integers: 2**64 by the golden ratio, odd. Products wrap around at 64 bits in the same way on every device.
        hashed = torch.arange(1, flat.numel() + 1, device=flat.device) * -7046029254386353131
        product = int((flat.long() * (hashed ^ (hashed >> 31))).sum())
        return TensorChecksum(tuple(value.shape), 0.0, product)
    flat = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).double()
    weights = checksum_weights(flat.numel(), flat.device) if weights is None else weights[: flat.numel()]
    norm, infinities = float(torch.linalg.vector_norm(flat)), 0.0
    if math.isinf(norm):  # masks hold infinities
        infinities = float((flat.isposinf().double() - flat.isneginf().double()) @ weights)
        flat = flat.nan_to_num(nan=math.nan, posinf=0.0, neginf=0.0)
        norm = float(torch.linalg.vector_norm(flat))
    return TensorChecksum(tuple(value.shape), norm, float(flat @ weights), infinities)


def checksum_weights(element_count: int, device: torch.device) -> Tensor:
    """The fixed weights; those of a smaller count are a prefix."""
    return torch.arange(1, element_count + 1, device=device, dtype=torch.float64).square_().mul_(0.7).cos_()


def compare_replicas(checksums_by_rank: RankChecksums, step: int, kind: str = "copy") -> list[Difference]:
    """Compare what several ranks hold of the same region; the first rank that has it is the reference."""
    norms = [c.norm for checksums in checksums_by_rank for c in checksums.values() if not c.has_nan]
    # Of gradients that are zero but for rounding.
    floor = RELATIVE_FLOOR * max(norms, default=0.0) if kind == "draw" else 0.0
    first_seen: dict[TensorRegion, tuple[int, TensorChecksum]] = {}
    comparisons = []
    for rank, checksums in enumerate(checksums_by_rank):
        for region, actual in checksums.items():
            first_rank, expected = first_seen.setdefault(region, (rank, actual))
            comparisons.append((region, rank, actual, expected, f"holds other numbers than rank {first_rank}"))
    return _worst_by_tensor(kind, step, comparisons, floor)


def compare_start_values(checksums_by_rank: RankChecksums, values: Mapping[str, Tensor], step: int) -> list[Difference]:
    """Compare each rank's values before the first step with the reference's `values`, where both have a tensor of that name."""
    expected: dict[TensorRegion, TensorChecksum] = {}
    comparisons = []
    for rank, checksums in enumerate(checksums_by_rank):
        for region, actual in checksums.items():
            if region.name in values:
                if region not in expected:
                    expected[region] = compute_checksum(region.extract(values[region.name]))
                mismatch = "starts from other numbers than one device does"
                comparisons.append((region, rank, actual, expected[region], mismatch))
    return _worst_by_tensor("start", step, comparisons)


def _worst_by_tensor(
    kind: str, step: int, comparisons: Iterable[tuple[TensorRegion, int, TensorChecksum, TensorChecksum, str]], floor: float = 0.0
) -> list[Difference]:  # fmt: skip
    """The largest difference of each tensor over its regions and ranks. Within bounds a difference carries no reason."""
    worst: dict[str, Difference] = {}
    for region, rank, actual, expected, mismatch in comparisons:
        value, name = actual.relative_difference(expected, floor), region.name
        if name not in worst or value > worst[name].value:
            reason = f"rank {rank} {'holds NaN' if actual.has_nan else mismatch}" if value > FLOAT64_BOUND else ""
            worst[name] = Difference(kind=kind, name=name, step=step, value=value, reason=reason)
    return list(worst.values())
