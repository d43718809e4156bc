"""Find the first divergent tensor, and whether it is a multiple of the reference or another known value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from echelon.verifier.compare import DIFFERENCE_KINDS, FLOAT64_BOUND, Bounds, Difference, to_float64
from echelon.verifier.reference import StepRecord

#: How exactly a tensor must be a multiple of the reference to be called one.
FACTOR_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class TensorPair:
    """The plan's tensor and the reference's, in float64."""

    actual: Tensor
    expected: Tensor

    @classmethod
    def find(cls, difference: Difference, actual: StepRecord, expected: StepRecord) -> TensorPair | None:
        """The tensors of a difference in two records; None where one of them lacks it."""
        a, b = (_find_tensor(difference, record) for record in (actual, expected))
        return None if a is None or b is None else cls(to_float64(a), to_float64(b))


def find_first_divergence(
    differences: Iterable[Difference], bounds: Bounds, forward_order: Mapping[str, int]
) -> Difference | None:
    """The first difference over its bound: by step, then in the order in which a step computes, then in forward order."""

    def position(difference: Difference) -> tuple[int, int, int]:
        kind = DIFFERENCE_KINDS.index(difference.kind)
        return difference.step, kind, forward_position(parameter_name(difference), forward_order)

    return min((difference for difference in differences if not bounds.allows(difference)), key=position, default=None)


def parameter_name(difference: Difference) -> str:
    return difference.name.split("/")[1] if difference.kind == "optimizer" else difference.name


def forward_position(name: str, forward_order: Mapping[str, int]) -> int:
    """When forward first entered the module that owns `name`, or else its parent."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in forward_order:
            return forward_order[path]
    return len(forward_order)


def _find_tensor(difference: Difference, record: StepRecord) -> Tensor | None:
    tensors: Mapping[str, Mapping[str, Tensor | None]] = {
        "gradient": record.gradients, "buffer": record.buffers, "parameter": record.parameters, "optimizer": record.optimizer,
        "loss": {"loss": record.loss}, "norm": {"gradient norm": record.norm},
    }  # fmt: skip
    return tensors.get(difference.kind, {}).get(difference.name)


def describe(divergence: Difference, bounds: Bounds) -> str:
    name, step = divergence.name, divergence.step
    bound = bounds.bound_for(divergence)
    amount = divergence.reason or f"relative difference {divergence.value:.1e}, bound {bound:.0e}"
    where = {
        "loss": f"loss at step {step}",
        "norm": f"gradient norm at step {step}",
        "start": f"{name} before the first step",
        "copy": f"{name} after step {step}",
        "draw": f"{name} with random numbers on, at step {step}",
        "output": f"{name} at step {step}",
        "optimizer": f"{name.rpartition('/')[2]} of {parameter_name(divergence)} (optimizer state) at step {step}",
    }
    return f"{where.get(divergence.kind, f'{divergence.kind} of {name} at step {step}')}: {amount}"


def equals_candidate_tensor(value: Tensor, pair: TensorPair) -> bool:
    """Whether the plan's tensor is `value` and not the reference's."""
    actual, expected = pair.actual, pair.expected
    if actual.shape != value.shape or not value.isfinite().all() or not actual.isfinite().all():
        return False
    residual, difference = _max_difference(actual, value), _max_difference(actual, expected)
    return residual <= FACTOR_TOLERANCE * float(value.abs().max()) + FLOAT64_BOUND and residual < 1e-3 * difference


def exact_ratio(pair: TensorPair) -> float | None:
    """The factor by which the reference is multiplied, if there is one."""
    factor = scalar_multiple(pair.actual, pair.expected)
    if factor is None:
        return None
    # It must explain the difference itself: what is off by 1e-7 in no pattern is "1 times the reference" otherwise.
    residual = _max_difference(pair.actual, factor * pair.expected)
    return factor if residual <= 1e-3 * _max_difference(pair.actual, pair.expected) else None


def scalar_multiple(value: Tensor, base: Tensor) -> float | None:
    a, b = to_float64(value).flatten(), to_float64(base).flatten()
    if a.shape != b.shape or a.is_complex() or not (a.isfinite().all() and b.isfinite().all()):
        return None
    square = float(b @ b)
    if square == 0.0:
        return None
    factor = float(a @ b) / square
    tolerance = FACTOR_TOLERANCE * max(abs(factor), FACTOR_TOLERANCE) * float(b.abs().max())
    return factor if _max_difference(a, factor * b) <= tolerance else None


def _max_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0
