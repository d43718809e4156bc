"""A tensor in two numbers, so that ranks can compare large ones without sending them: do they hold the same, and did they start from it?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.verifier.compare import FLOAT64_BOUND, NOT_COMPARABLE, RELATIVE_FLOOR, Difference


@dataclass(frozen=True, slots=True)
class TensorChecksum:
    """A tensor's shape, its 2-norm, and its product with fixed weights that no tensor is likely to be at right angles with.

    Infinities count in `infinities` alone: the product of the weights with 1 or -1 in their places. NaN is in the norm. Of whole numbers
    there is a product alone, which is exact.
    """

    shape: tuple[int, ...]
    norm: float
    product: float | int
    infinities: float = 0.0

    @property
    def has_nan(self) -> bool:
        """Whether it is the mark of a tensor that holds NaN."""
        return math.isnan(self.norm)

    def relative_difference(self, reference: TensorChecksum, floor: float = 0.0) -> float:
        """About |a - b| / |b|: the weights are about one, and signs fall as by chance. `floor`: |b| counts for no less.

        NaN is no number, on both sides too; infinities have to be in the same places.
        """
        if self.shape != reference.shape or self.has_nan or reference.has_nan:
            return NOT_COMPARABLE
        if abs(self.infinities - reference.infinities) > FLOAT64_BOUND:
            return NOT_COMPARABLE
        if self == reference:
            return 0.0
        if isinstance(reference.product, int):
            return 1.0  # whole numbers have no rounding
        difference = max(abs(self.product - reference.product), abs(self.norm - reference.norm))
        scale = max(reference.norm, floor)
        value = difference / scale if scale else NOT_COMPARABLE
        return value if value < NOT_COMPARABLE else NOT_COMPARABLE  # NaN too


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """A part of a parameter or buffer: ranks that have the same place hold copies."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def extract(self, full_tensor: Tensor) -> Tensor:
        """This part of it."""
        return full_tensor[
            tuple(slice(offset, offset + size) for offset, size in zip(self.start, self.shape, strict=True))
        ]


#: What each rank holds, in rank order.
RankChecksums = Sequence[Mapping[TensorRegion, TensorChecksum]]


def compute_checksum(value: Tensor, weights: Tensor | None = None) -> TensorChecksum:
    """The mark of a tensor; `weights` for floating numbers, where somebody has made enough of them."""
    flat = value.detach().reshape(-1)
    if not (flat.is_floating_point() or flat.is_complex()):
        return TensorChecksum(
            tuple(value.shape), 0.0, int((flat.long() * _integer_weights(flat.numel(), flat.device)).sum())
        )
    flat = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).double()
    weights = checksum_weights(flat.numel(), flat.device) if weights is None else weights[: flat.numel()]
    norm, infinities = float(torch.linalg.vector_norm(flat)), 0.0
    if math.isinf(norm):  # masks hold infinities
        infinities = float((flat.isposinf().double() - flat.isneginf().double()) @ weights)
        flat = flat.nan_to_num(nan=math.nan, posinf=0.0, neginf=0.0)
        norm = float(torch.linalg.vector_norm(flat))
    return TensorChecksum(tuple(value.shape), norm, float(flat @ weights), infinities)


def checksum_weights(element_count: int, device: torch.device) -> Tensor:
    """The fixed weights of so many numbers: the first of more are the same."""
    return torch.arange(1, element_count + 1, device=device, dtype=torch.float64).square_().mul_(0.7).cos_()


def _integer_weights(element_count: int, device: torch.device) -> Tensor:
    """The same for whole numbers: products wrap around at 64 bits, alike on every device."""
    hashed = torch.arange(1, element_count + 1, device=device) * -7046029254386353131  # 2**64 by the golden ratio, odd
    return hashed ^ (hashed >> 31)


def compare_replicas(checksums_by_rank: RankChecksums, step: int, kind: str = "copy") -> list[Difference]:
    """After a step: what several ranks hold is the same on all of them."""
    norms = (
        checksum.norm for checksums in checksums_by_rank for checksum in checksums.values() if not checksum.has_nan
    )
    floor = (
        RELATIVE_FLOOR * max(norms, default=0.0) if kind == "draw" else 0.0
    )  # gradients that are zero but for rounding
    first_seen: dict[TensorRegion, tuple[int, TensorChecksum]] = {}
    differences: dict[str, Difference] = {}
    for rank, checksums in enumerate(checksums_by_rank):
        for region, actual in checksums.items():
            first_rank, expected = first_seen.setdefault(region, (rank, actual))
            reason = _mismatch_reason(rank, actual, f"holds other numbers than rank {first_rank}")
            _keep_largest(
                differences,
                Difference(
                    kind=kind,
                    name=region.name,
                    step=step,
                    value=actual.relative_difference(expected, floor),
                    reason=reason,
                ),
            )
    return list(differences.values())


def compare_start_values(
    checksums_by_rank: RankChecksums, reference: Mapping[str, Tensor], step: int
) -> list[Difference]:
    """Before the first step: every rank has the reference's values, as far as both have a tensor of that name."""
    expected: dict[TensorRegion, TensorChecksum] = {}
    differences: dict[str, Difference] = {}
    for rank, checksums in enumerate(checksums_by_rank):
        for region, actual in checksums.items():
            if region.name in reference:
                if region not in expected:
                    expected[region] = compute_checksum(region.extract(reference[region.name]))
                expected_checksum = expected[region]
                reason = _mismatch_reason(rank, actual, "starts from other numbers than one device does")
                _keep_largest(
                    differences,
                    Difference(
                        kind="start",
                        name=region.name,
                        step=step,
                        value=actual.relative_difference(expected_checksum),
                        reason=reason,
                    ),
                )
    return list(differences.values())


def _mismatch_reason(rank: int, checksum: TensorChecksum, mismatch: str) -> str:
    return f"rank {rank} {'holds NaN' if checksum.has_nan else mismatch}"


def _keep_largest(differences: dict[str, Difference], difference: Difference) -> None:
    """The worst of each tensor; within bounds there is nothing to explain."""
    if difference.name not in differences or difference.value > differences[difference.name].value:
        without_reason = Difference(
            kind=difference.kind, name=difference.name, step=difference.step, value=difference.value
        )
        differences[difference.name] = difference if difference.value > FLOAT64_BOUND else without_reason
