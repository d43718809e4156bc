"""`echelon doctor`: what is here, and what will not work and why."""

from __future__ import annotations

import platform
import shutil
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.common import Debug, Json, bytes_text, console, measured, print_json, seconds_text, table

if TYPE_CHECKING:
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
    versions, problems = _versions(), _problems(cluster)
    if json:
        print_json({"cluster": to_plain(cluster), "versions": versions, "will_not_work": problems})
        return
    screen = console()
    for node in cluster.nodes:
        screen.print(f"{node.name}: {node.cores} cores, {bytes_text(node.memory)} of memory")
        for device in node.devices:
            screen.print(_device(device))
        if node.links:
            rows = table("between ranks", "by", "ranks", "latency", "bandwidth", left=2)
            for link in node.links:
                rate = f"{bytes_text(link.bandwidth)}/s"
                rows.add_row(
                    link.operation.replace("_", "-"), link.backend, str(link.ranks), seconds_text(link.latency), rate
                )
            screen.print(rows)
    screen.print("versions: " + ", ".join(f"{name} {number}" for name, number in versions.items()))
    for note in cluster.notes:
        screen.print(f"note: {note}")
    for problem in problems:
        screen.print(f"will not work: {problem}")


def _device(device: Device) -> str:
    instructions = ", ".join(device.instructions) or "none that matter"
    lines = [f"  {device.kind} {device.name}: {bytes_text(device.memory)}; instructions: {instructions}"]
    for curve in device.curves:
        best = max(point.rate for point in curve.points)
        # Products are counted in floating-point operations, everything else in bytes.
        counts = curve.operation in ("matmul", "convolution", "attention")
        rate = f"{best / 1e9:,.0f} GFLOP/s" if counts else f"{bytes_text(best)}/s"
        load = f"{curve.ranks} x {curve.threads} threads" if device.kind == "cpu" else f"{curve.ranks} ranks"
        lines.append(f"    {curve.operation} {curve.dtype}, {load}: up to {rate} per rank")
    return "\n".join(lines)


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
        found += [
            f"precision={name} at speed: this CPU has no {name} instructions, about 100 times slower than fp32"
            for name in ("bf16", "fp16")
            if name not in device.instructions
        ]
        if torch.cuda.device_count() == 0:
            found.append("training on a GPU: torch sees none")
        if not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
            found.append("plans with `compile`: torch.compile needs a C++ compiler on a CPU (g++ or clang++)")
    found.append("the axes tp, pp, cp and ep: this version executes the data axis (dp) only")
    return found
