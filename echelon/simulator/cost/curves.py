"""What one operator, one optimizer step or one message costs on a device, from its measured curves alone."""

from __future__ import annotations

from echelon.plan.plan import Precision
from echelon.plan.profile import Operator, OptimizerProfile, rate_dims
from echelon.simulator.node_load import NodeLoad

#: Rate of a device that was never measured for anything alike, bytes or FLOPs per second: slow enough not to flatter.
_UNMEASURED_RATE = 1e9


def operator_seconds(operator: Operator, samples: int, load: NodeLoad, precision: Precision) -> float:
    """One call at a micro-batch of `samples`, the device's overhead per operator aside."""
    dims = tuple(amount.at(samples) for amount in operator.dims)
    if operator.kind == "stream":
        moved = operator.moved.at(samples)
        return moved / measured_rate(load, (operator.name, "add"), operator.dtype, (moved,), dims)
    names: tuple[str, ...] = (operator.name,)
    if operator.kind == "matmul":
        base, _, layout = operator.name.partition(":")
        names = (operator.name, f"{base}:nn", f"mm:{layout}", "mm:nn")
    dtype = (
        "tf32"
        if precision == "tf32" and operator.dtype == "float32" and operator.kind != "attention"
        else operator.dtype
    )
    return operator.flops.at(samples) / measured_rate(load, names, dtype, rate_dims(operator.kind, dims))


def measured_rate(load: NodeLoad, names: tuple[str, ...], dtype: str, *dims_options: tuple[float, ...]) -> float:
    """The rate of the first of `names` that was measured, under this load. A type that was not measured goes by its nearest.

    `dims_options`: what it may have been measured by, in numbers of dims that differ.
    """
    for candidate_dtype in dict.fromkeys((dtype, *(("bfloat16",) if dtype == "float16" else ()), "float32")):
        for name in names:
            curve = load.device.nearest_curve(name, candidate_dtype, ranks=load.ranks, threads=load.threads)
            dims = next((option for option in dims_options if curve and len(curve.points[0].dims) == len(option)), None)
            if curve is not None and dims is not None:
                # Measured with more threads than the plan gives: take them in proportion.
                thread_fraction = min(load.threads / curve.threads, 1.0) if load.device.kind == "cpu" else 1.0
                return curve.rate_at(dims) * thread_fraction / load.oversubscription
    return _UNMEASURED_RATE


def stream_seconds(load: NodeLoad, name: str, moved: float) -> float:
    """Seconds in which `name` (an element-wise operator) moves so many bytes."""
    return moved / measured_rate(load, (name, "add"), "float32", (moved,)) if moved else 0.0


def optimizer_seconds(optimizer: OptimizerProfile, load: NodeLoad, *, fused: bool, fraction: float) -> float:
    """One optimizer step over `fraction` of the elements; `fused`: by a fused kernel."""
    elements = optimizer.trainable_elements * fraction
    optimizer_name = optimizer.name if optimizer.state_bytes or optimizer.name != "SGD" else "plain-SGD"
    suffix = ":fused" if fused else ""
    return (
        elements / measured_rate(load, (optimizer_name + suffix, "AdamW" + suffix, "AdamW"), "float32", (elements,))
        if elements
        else 0.0
    )


def message_seconds(load: NodeLoad, operation: str, size: float, ranks: int) -> float:
    """One collective over `ranks` of the node. Unmeasured: through memory, twice."""
    if ranks < 2 or not size:
        return 0.0
    timing = load.node.nearest_timing(operation, ranks)
    if timing is None:
        return 2 * stream_seconds(load, "copy_", 2 * size)
    # A ring moves (n - 1) / n of the data per rank whatever n: carried over from the number of ranks measured.
    scale = ((ranks - 1) / ranks) / ((timing.ranks - 1) / timing.ranks)
    return timing.seconds(size) * max(scale, 1.0) * load.oversubscription
