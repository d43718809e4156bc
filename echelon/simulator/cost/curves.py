"""What one operator, one optimizer step or one message costs on a device, from its measured curves alone."""

from __future__ import annotations

from echelon.plan.plan import Precision
from echelon.plan.profile import Operator, Rule, rate_dims
from echelon.simulator.node_load import Load

#: Rate of a device that was never measured for anything alike, bytes or FLOPs per second: slow enough not to flatter.
_UNKNOWN = 1e9


def operator_seconds(operator: Operator, samples: int, load: Load, precision: Precision) -> float:
    """One call at a micro-batch of `samples`, the device's overhead per operator aside."""
    dims = tuple(amount.at(samples) for amount in operator.dims)
    if operator.kind == "stream":
        moved = operator.moved.at(samples)
        return moved / rate(load, (operator.name, "add"), operator.dtype, (moved,), dims)
    names: tuple[str, ...] = (operator.name,)
    if operator.kind == "matmul":
        base, _, layout = operator.name.partition(":")
        names = (operator.name, f"{base}:nn", f"mm:{layout}", "mm:nn")
    dtype = (
        "tf32"
        if precision == "tf32" and operator.dtype == "float32" and operator.kind != "attention"
        else operator.dtype
    )
    return operator.flops.at(samples) / rate(load, names, dtype, rate_dims(operator.kind, dims))


def rate(load: Load, names: tuple[str, ...], dtype: str, *shapes: tuple[float, ...]) -> float:
    """The rate of the first of `names` that was measured, under this load. A type that was not measured goes by its nearest.

    `shapes`: what it may have been measured by, in numbers of dims that differ.
    """
    for kind in dict.fromkeys((dtype, *(("bfloat16",) if dtype == "float16" else ()), "float32")):
        for name in names:
            curve = load.device.curve(name, kind, ranks=load.ranks, threads=load.threads)
            dims = next((each for each in shapes if curve and len(curve.points[0].dims) == len(each)), None)
            if curve is not None and dims is not None:
                # Measured with more threads than the plan gives: take them in proportion.
                share = min(load.threads / curve.threads, 1.0) if load.device.kind == "cpu" else 1.0
                return curve.rate(dims) * share / load.crowding
    return _UNKNOWN


def stream_seconds(load: Load, name: str, moved: float) -> float:
    """Seconds in which `name` (an element-wise operator) moves so many bytes."""
    return moved / rate(load, (name, "add"), "float32", (moved,)) if moved else 0.0


def optimizer_seconds(rule: Rule, load: Load, *, fused: bool, share: float) -> float:
    """One optimizer step over `share` of the elements; `fused`: by a fused kernel."""
    elements = rule.elements * share
    plain = rule.name if rule.state or rule.name != "SGD" else "plain-SGD"
    suffix = ":fused" if fused else ""
    return (
        elements / rate(load, (plain + suffix, "AdamW" + suffix, "AdamW"), "float32", (elements,)) if elements else 0.0
    )


def message_seconds(load: Load, operation: str, size: float, ranks: int) -> float:
    """One collective over `ranks` of the node. Unmeasured: through memory, twice."""
    if ranks < 2 or not size:
        return 0.0
    link = load.node.link(operation, ranks)
    if link is None:
        return 2 * stream_seconds(load, "copy_", 2 * size)
    # A ring moves (n - 1) / n of the data per rank whatever n: carried over from the number of ranks measured.
    scale = ((ranks - 1) / ranks) / ((link.ranks - 1) / link.ranks)
    return link.seconds(size) * max(scale, 1.0) * load.crowding
