"""`echelon doctor`: what is here, what is slow, and what will not work and why."""

from __future__ import annotations

import platform
import shutil
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.common import Debug, Json, console, measured, print_json, table
from echelon.plan.format_units import seconds, size

if TYPE_CHECKING:
    from rich.table import Table

    from echelon.plan.cluster import Cluster, Device


def doctor(
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, even if this machine is known.")] = False,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", help="Keep the cluster in a file, to plan for it elsewhere."),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what is here and what will not work.

    Devices and their measured rates, links between ranks, versions; each thing that will not work comes with its reason.
    """
    from echelon.plan.codec import to_plain

    cluster = measured(refresh=refresh)
    if out is not None:
        cluster.save(out)
    versions, problems, slow = _versions(), _problems(cluster), _slow(cluster.nodes[0].devices[0])
    if json:
        print_json({"cluster": to_plain(cluster), "versions": versions, "slow": slow, "will_not_work": problems})
        return
    screen = console()
    for node in cluster.nodes:
        screen.print(f"{node.name}: {node.cores} cores, {size(node.memory)} of memory")
        for device in node.devices:
            instructions = f"; instructions: {', '.join(device.instructions)}" if device.instructions else ""
            screen.print(f"{device.kind} {device.name}: {size(device.memory)}{instructions}")
            screen.print(_rates(device))
        if node.links:
            rows = table("between ranks", "by", "ranks", "latency", "bandwidth", left=2)
            for link in node.links:
                rate = f"{size(link.bandwidth)}/s"
                rows.add_row(
                    link.operation.replace("_", "-"), link.backend, str(link.ranks), seconds(link.latency), rate
                )
            screen.print(rows)
    screen.print("versions: " + ", ".join(f"{name} {number}" for name, number in versions.items()))
    for note in cluster.notes:
        screen.print(f"note: {note}")
    for what in slow:
        screen.print(f"slow: {what}")
    for problem in problems:
        screen.print(f"will not work: {problem}")


#: Family of operators -> how their names begin, what is counted, and how much of it is the unit.
_FAMILIES = {
    "matrix products": (("mm", "addmm", "bmm", "baddbmm"), "GFLOP/s", 1e9),
    "convolutions": (("convolution",), "GFLOP/s", 1e9),
    "attention": (("scaled_dot", "_scaled_dot", "_flash", "_efficient"), "GFLOP/s", 1e9),
    "optimizers": (("AdamW", "SGD", "Adagrad", "plain-SGD"), "M elements/s", 1e6),
    "element by element": (("",), "GB/s", 1e9),
}


def _rates(device: Device) -> Table:
    """The best rate of each family of operators, by type and by how many ranks compute at once."""
    best: dict[tuple[str, str, str], float] = {}
    for curve in device.curves:
        family = next(name for name, (starts, _, _) in _FAMILIES.items() if curve.operation.startswith(starts))
        load = (
            f"{curve.ranks} x {curve.threads} thread{'s' * (curve.threads > 1)}"
            if device.kind == "cpu"
            else f"{curve.ranks}"
        )
        key = (family, curve.dtype, load)
        best[key] = max(best.get(key, 0.0), *(point.rate for point in curve.points))
    rows = table("measured", "type", "ranks", "up to, per rank", left=3)
    for family, (_, unit, scale) in _FAMILIES.items():
        for (name, dtype, load), rate in sorted(best.items()):
            if name == family:
                rows.add_row(family, dtype, load, f"{_figure(rate / scale)} {unit}")
    return rows


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _slower(device: Device, dtype: str) -> float | None:
    """How many times slower matrix products of `dtype` are than those of float32; None: not measured."""
    rates: dict[str, float] = {}
    for curve in device.curves:
        if curve.operation.startswith(_FAMILIES["matrix products"][0]):
            rates[curve.dtype] = max(rates.get(curve.dtype, 0.0), *(point.rate for point in curve.points))
    return rates["float32"] / rates[dtype] if {"float32", dtype} <= set(rates) else None


def _slow(device: Device) -> list[str]:
    """What works here, but more slowly than what a user might think it improves on."""
    found = []
    for precision, dtype in (("bf16", "bfloat16"), ("fp16", "float16")) if device.kind == "cpu" else ():
        slower = _slower(device, dtype)
        if slower is not None and slower > 1:
            found.append(
                f"precision={precision}: matrix products measured {_figure(slower)} times slower than fp32's on this CPU"
            )
    return found


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("echelon", "torch", "numpy", "scipy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "checkout" if name == "echelon" else "missing"
    return found


def _problems(cluster: Cluster) -> list[str]:
    """What a user might try and would not get here, with the reason."""
    import torch

    device = cluster.nodes[0].devices[0]
    found = []
    if not torch.distributed.is_available():
        found.append("more than one rank: this torch was built without torch.distributed")
    if device.kind == "cpu":
        if torch.cuda.device_count() == 0:
            found.append("training on a GPU: torch sees none")
        if not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
            found.append("plans with `compile`: torch.compile needs a C++ compiler on a CPU (g++ or clang++)")
    found.append("the axes cp and ep: plans with them are forecast and not executed yet")
    return found
