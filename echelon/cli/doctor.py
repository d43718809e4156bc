"""`echelon doctor`: what this machine has, what is slow, and what will not work and why."""

from __future__ import annotations

import platform
import shutil
from typing import TYPE_CHECKING, Annotated

from typer import Option

from echelon.cli.common import DebugOption, JsonOption, make_table, measure_machine, print_answer
from echelon.plan.format_units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from echelon.plan.cluster import Cluster, Device, Node


def doctor(
    refresh: Annotated[bool, Option("--refresh", help="Measure again, even if this machine is known.")] = False,
    out: Annotated[str | None, Option("--out", "-o", metavar="FILE", help="Save the cluster, to plan for it.")] = None,
    json: JsonOption = False, debug: DebugOption = False,
) -> None:  # fmt: skip
    """Measure this machine and list what will not work.

    Shows devices and their measured rates, links between ranks, versions, and the reason for each limit.
    """
    from echelon.plan.codec import to_plain

    cluster = measure_machine(refresh=refresh)
    if out is not None:
        cluster.save(out)
    versions, problems = _installed_versions(), _list_problems(cluster)
    slow = _slow_precisions(cluster.nodes[0].devices[0])
    print_answer(
        json,
        {"cluster": to_plain(cluster), "versions": versions, "slow": slow, "will_not_work": problems},
        *(part for node in cluster.nodes for part in _describe_node(node)),
        "versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()),
        *(f"note: {note}" for note in cluster.notes),
        *(f"slow: {warning}" for warning in slow),
        *(f"will not work: {problem}" for problem in problems),
    )


#: Family of operators -> prefixes of their names, unit, and the scale of that unit.
_OPERATOR_FAMILIES = {
    "matrix products": (("mm", "addmm", "bmm", "baddbmm"), "GFLOP/s", 1e9),
    "convolutions": (("convolution",), "GFLOP/s", 1e9),
    "attention": (("scaled_dot", "_scaled_dot", "_flash", "_efficient"), "GFLOP/s", 1e9),
    "optimizers": (("AdamW", "SGD", "Adagrad", "plain-SGD"), "M elements/s", 1e6),
    "element by element": (("",), "GB/s", 1e9),
}


def _describe_node(node: Node) -> list[str | Table]:
    parts: list[str | Table] = [f"{node.name}: {node.cores} cores, {format_bytes(node.memory)} of memory"]
    for device in node.devices:
        instructions = f"; instructions: {', '.join(device.instructions)}" if device.instructions else ""
        parts.append(f"{device.kind} {device.name}: {format_bytes(device.memory)}{instructions}")
        parts.append(_rate_table(device))
    if node.links:
        table = make_table("between ranks", "by", "ranks", "latency", "bandwidth", text_columns=2)
        for link in node.links:
            operation, bandwidth = link.operation.replace("_", "-"), f"{format_bytes(link.bandwidth)}/s"
            table.add_row(operation, link.backend, str(link.ranks), format_seconds(link.latency), bandwidth)
        parts.append(table)
    return parts


def _rate_table(device: Device) -> Table:
    """The best rate of each family of operators, by type and by number of concurrent ranks."""
    best_rates: dict[tuple[str, str, str], float] = {}
    for curve in device.curves:
        families = _OPERATOR_FAMILIES.items()
        family = next(name for name, (prefixes, _, _) in families if curve.operation.startswith(prefixes))
        threads = f" x {curve.threads} thread{'s' * (curve.threads > 1)}" if device.kind == "cpu" else ""
        key = (family, curve.dtype, f"{curve.ranks}{threads}")
        best_rates[key] = max(best_rates.get(key, 0.0), *(point.rate for point in curve.points))
    table = make_table("measured", "type", "ranks", "up to, per rank", text_columns=3)
    for family, (_, unit, scale) in _OPERATOR_FAMILIES.items():
        for (name, dtype, load), rate in sorted(best_rates.items()):
            if name == family:
                table.add_row(family, dtype, load, f"{_format_figure(rate / scale)} {unit}")
    return table


def _format_figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _slow_precisions(device: Device) -> list[str]:
    """Precisions that work but are slower than float32."""
    rates: dict[str, float] = {}
    for curve in device.curves if device.kind == "cpu" else ():
        if curve.operation.startswith(_OPERATOR_FAMILIES["matrix products"][0]):
            rates[curve.dtype] = max(rates.get(curve.dtype, 0.0), *(point.rate for point in curve.points))
    warnings = []
    for precision, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        slowdown = rates["float32"] / rates[dtype] if {"float32", dtype} <= set(rates) else 0.0
        if slowdown > 1:
            comparison = f"measured {_format_figure(slowdown)} times slower than fp32's on this CPU"
            warnings.append(f"precision={precision}: matrix products {comparison}")
    return warnings


def _installed_versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for name in ("echelon", "torch", "numpy", "scipy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "checkout" if name == "echelon" else "missing"
    return versions


def _list_problems(cluster: Cluster) -> list[str]:
    import torch

    problems = []
    if not torch.distributed.is_available():
        problems.append("more than one rank: this torch was built without torch.distributed")
    if cluster.nodes[0].devices[0].kind == "cpu":
        if torch.cuda.device_count() == 0:
            problems.append("training on a GPU: torch sees none")
        if not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
            problems.append("plans with `compile`: torch.compile needs a C++ compiler on a CPU (g++ or clang++)")
    problems.append("the axes cp and ep: plans that use them are forecast, but not executed yet")
    return problems
