"""`echelon doctor`: what is here, what is slow, and what will not work and why."""

from __future__ import annotations

import platform
import shutil
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.common import DebugOption, JsonOption, make_console, make_table, measure_machine, print_json
from echelon.plan.format_units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from echelon.plan.cluster import Cluster, Device


def doctor(
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, even if this machine is known.")] = False,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", help="Keep the cluster in a file, to plan for it elsewhere."),
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what is here and what will not work.

    Devices and their measured rates, links between ranks, versions; each thing that will not work comes with its reason.
    """
    from echelon.plan.codec import to_plain

    cluster = measure_machine(refresh=refresh)
    if out is not None:
        cluster.save(out)
    versions, problems, slow_operations = (
        _installed_versions(),
        _list_problems(cluster),
        _slow_precisions(cluster.nodes[0].devices[0]),
    )
    if json:
        print_json(
            {"cluster": to_plain(cluster), "versions": versions, "slow": slow_operations, "will_not_work": problems}
        )
        return
    terminal = make_console()
    for node in cluster.nodes:
        terminal.print(f"{node.name}: {node.cores} cores, {format_bytes(node.memory)} of memory")
        for device in node.devices:
            instructions = f"; instructions: {', '.join(device.instructions)}" if device.instructions else ""
            terminal.print(f"{device.kind} {device.name}: {format_bytes(device.memory)}{instructions}")
            terminal.print(_rate_table(device))
        if node.links:
            link_table = make_table("between ranks", "by", "ranks", "latency", "bandwidth", text_columns=2)
            for link in node.links:
                rate = f"{format_bytes(link.bandwidth)}/s"
                link_table.add_row(
                    link.operation.replace("_", "-"), link.backend, str(link.ranks), format_seconds(link.latency), rate
                )
            terminal.print(link_table)
    terminal.print("versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    for note in cluster.notes:
        terminal.print(f"note: {note}")
    for warning in slow_operations:
        terminal.print(f"slow: {warning}")
    for problem in problems:
        terminal.print(f"will not work: {problem}")


#: Family of operators -> how their names begin, what is counted, and how much of it is the unit.
_OPERATOR_FAMILIES = {
    "matrix products": (("mm", "addmm", "bmm", "baddbmm"), "GFLOP/s", 1e9),
    "convolutions": (("convolution",), "GFLOP/s", 1e9),
    "attention": (("scaled_dot", "_scaled_dot", "_flash", "_efficient"), "GFLOP/s", 1e9),
    "optimizers": (("AdamW", "SGD", "Adagrad", "plain-SGD"), "M elements/s", 1e6),
    "element by element": (("",), "GB/s", 1e9),
}


def _rate_table(device: Device) -> Table:
    """The best rate of each family of operators, by type and by how many ranks compute at once."""
    best_rates: dict[tuple[str, str, str], float] = {}
    for curve in device.curves:
        family = next(
            name for name, (prefixes, _, _) in _OPERATOR_FAMILIES.items() if curve.operation.startswith(prefixes)
        )
        load = (
            f"{curve.ranks} x {curve.threads} thread{'s' * (curve.threads > 1)}"
            if device.kind == "cpu"
            else f"{curve.ranks}"
        )
        key = (family, curve.dtype, load)
        best_rates[key] = max(best_rates.get(key, 0.0), *(point.rate for point in curve.points))
    rate_table = make_table("measured", "type", "ranks", "up to, per rank", text_columns=3)
    for family, (_, unit, scale) in _OPERATOR_FAMILIES.items():
        for (name, dtype, load), rate in sorted(best_rates.items()):
            if name == family:
                rate_table.add_row(family, dtype, load, f"{_format_figure(rate / scale)} {unit}")
    return rate_table


def _format_figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _slowdown(device: Device, dtype: str) -> float | None:
    """How many times slower matrix products of `dtype` are than those of float32; None: not measured."""
    rates: dict[str, float] = {}
    for curve in device.curves:
        if curve.operation.startswith(_OPERATOR_FAMILIES["matrix products"][0]):
            rates[curve.dtype] = max(rates.get(curve.dtype, 0.0), *(point.rate for point in curve.points))
    return rates["float32"] / rates[dtype] if {"float32", dtype} <= set(rates) else None


def _slow_precisions(device: Device) -> list[str]:
    """What works here, but more slowly than what a user might think it improves on."""
    slow_operations = []
    for precision, dtype in (("bf16", "bfloat16"), ("fp16", "float16")) if device.kind == "cpu" else ():
        slowdown = _slowdown(device, dtype)
        if slowdown is not None and slowdown > 1:
            slow_operations.append(
                f"precision={precision}: matrix products measured {_format_figure(slowdown)} times slower than fp32's on this CPU"
            )
    return slow_operations


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
    """What a user might try and would not get here, with the reason."""
    import torch

    device = cluster.nodes[0].devices[0]
    problems = []
    if not torch.distributed.is_available():
        problems.append("more than one rank: this torch was built without torch.distributed")
    if device.kind == "cpu":
        if torch.cuda.device_count() == 0:
            problems.append("training on a GPU: torch sees none")
        if not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
            problems.append("plans with `compile`: torch.compile needs a C++ compiler on a CPU (g++ or clang++)")
    problems.append("the axes cp and ep: plans with them are forecast and not executed yet")
    return problems
