"""Which tensor went wrong first, and whether it is a multiple of the reference or another value that is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from echelon.verifier.compare import DIFFERENCE_KINDS, FLOAT64_BOUND, Bounds, Difference, to_float64
from echelon.verifier.reference import StepRecord

#: How exactly a tensor must be a multiple of the reference to be called one.
FACTOR_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPair:
    """A tensor of the plan's run and the reference's."""

    actual: Tensor
    expected: Tensor


def find_first_divergence(
    differences: Iterable[Difference], bounds: Bounds, forward_order: Mapping[str, int]
) -> Difference | None:
    """The first difference over its bound: by step, then in the order in which a step makes things, then in forward order."""
    out_of_bounds = [difference for difference in differences if not bounds.allows(difference)]
    return min(
        out_of_bounds,
        key=lambda difference: (
            difference.step,
            DIFFERENCE_KINDS.index(difference.kind),
            forward_position(parameter_name(difference), forward_order),
        ),
        default=None,
    )


def parameter_name(difference: Difference) -> str:
    """The parameter or buffer that a difference is about."""
    return difference.name.split("/")[1] if difference.kind == "optimizer" else difference.name


def forward_position(name: str, forward_order: Mapping[str, int]) -> int:
    """When forward first entered the module that owns `name`; one it never enters itself stands with its parent."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in forward_order:
            return forward_order[path]
    return len(forward_order)


def tensor_pair(difference: Difference, actual: StepRecord, expected: StepRecord) -> TensorPair | None:
    """The two tensors behind a difference, where both runs have one."""
    readers: Mapping[str, Callable[[StepRecord], Mapping[str, Tensor | None]]] = {
        "gradient": lambda record: record.gradients, "buffer": lambda record: record.buffers,
        "parameter": lambda record: record.parameters, "optimizer": lambda record: record.optimizer,
        "loss": lambda record: {"loss": record.loss}, "norm": lambda record: {"gradient norm": record.norm},
    }  # fmt: skip
    if difference.kind not in readers:
        return None
    actual_tensor, expected_tensor = (
        readers[difference.kind](record).get(difference.name) for record in (actual, expected)
    )
    return (
        None
        if actual_tensor is None or expected_tensor is None
        else TensorPair(actual=actual_tensor, expected=expected_tensor)
    )


def describe(divergence: Difference, bounds: Bounds) -> str:
    """What is off and by how much."""
    amount = (
        divergence.reason or f"relative difference {divergence.value:.1e}, bound {bounds.bound_for(divergence):.0e}"
    )
    where = {
        "loss": f"loss at step {divergence.step}",
        "norm": f"gradient norm at step {divergence.step}",
        "start": f"{divergence.name} before the first step",
        "copy": f"{divergence.name} after step {divergence.step}",
        "draw": f"{divergence.name} with random numbers on, at step {divergence.step}",
        "output": f"{divergence.name} at step {divergence.step}",
        "optimizer": f"{divergence.name.rpartition('/')[2]} of {parameter_name(divergence)} (optimizer state) at step {divergence.step}",
    }
    return (
        f"{where.get(divergence.kind, f'{divergence.kind} of {divergence.name} at step {divergence.step}')}: {amount}"
    )


def equals_candidate_tensor(value: Tensor, pair: TensorPair) -> bool:
    """Whether the plan's tensor is `value` rather than the reference's."""
    actual, expected = to_float64(pair.actual), to_float64(pair.expected)
    if actual.shape != value.shape or not value.isfinite().all() or not actual.isfinite().all():
        return False
    residual = float((actual - value).abs().max()) if actual.numel() else 0.0
    return residual <= FACTOR_TOLERANCE * float(value.abs().max()) + FLOAT64_BOUND and residual < 1e-3 * float(
        (actual - expected).abs().max()
    )


def exact_ratio(pair: TensorPair) -> float | None:
    """The number that the reference is multiplied by, where there is one."""
    factor = scalar_multiple(pair.actual, pair.expected)
    if factor is None:
        return None
    actual, expected = to_float64(pair.actual), to_float64(pair.expected)
    # It has to explain the difference itself: what is off by 1e-7 in no pattern is "1 times the reference" but for that.
    residual = float((actual - factor * expected).abs().max())
    return factor if residual <= 1e-3 * float((actual - expected).abs().max()) else None


def scalar_multiple(value: Tensor, base: Tensor) -> float | None:
    """`value` as a multiple of `base`, where it is one."""
    a, b = to_float64(value).flatten(), to_float64(base).flatten()
    if a.shape != b.shape or a.is_complex() or not (a.isfinite().all() and b.isfinite().all()):
        return None
    square = float(b @ b)
    if square == 0.0:
        return None
    factor = float(a @ b) / square
    residual = float((a - factor * b).abs().max())
    return factor if residual <= FACTOR_TOLERANCE * max(abs(factor), FACTOR_TOLERANCE) * float(b.abs().max()) else None
