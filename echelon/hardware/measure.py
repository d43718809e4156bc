"""This machine as a Cluster: what it has, and what processes of its own were timed at."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.errors import LaunchError
from echelon.launchers.environment import child_environment
from echelon.launchers.local import die_with_parent
from echelon.plan.cluster import Cluster, Curve, Device, Link, Node, Point
from echelon.plan.document_cache import Store, installed_versions
from echelon.world import cache_folder, usable_cores, usable_memory, visible_devices

#: `progress(what, share)`: a line for people and how much is done, 0 to 1.
Progress = Callable[[str, float], None]
#: Seconds of work on trials in each measuring process at most, by device; on a busy machine it may wait longer than it works.
_SECONDS = {"cpu": 16.0, "cuda": 32.0}
#: Reports of one whole measuring process, for the progress display only.
_REPORTS = 260
#: What an instruction set is called in /proc/cpuinfo -> what it is good for.
_INSTRUCTIONS = {
    "avx2": "avx2", "avx512f": "avx512", "avx512_bf16": "avx512-bf16", "avx512_fp16": "avx512-fp16", "avx512_vnni": "avx512-vnni",
    "amx_bf16": "amx-bf16", "amx_int8": "amx-int8", "asimd": "neon", "asimddp": "int8-dot", "asimdhp": "fp16-vector", "sve": "sve",
    "sve2": "sve2", "bf16": "bf16", "i8mm": "int8-matrix",
}  # fmt: skip


def measure(*, refresh: bool = False, store: Store | None = None, progress: Progress | None = None) -> Cluster:
    """The machine that is here. Timed once (under half a minute; a GPU: a little over one) and kept; `refresh` times it again."""
    store = store or Store(cache_folder())
    known = None if refresh else known_cluster(store=store)
    if known is not None:
        return known
    versions = installed_versions()
    cluster = _measured(len(_gpus()), progress or (lambda what, share: None), versions)
    try:
        store.put(_key(), cluster, versions=versions)
    except OSError as error:
        note = (
            f"{store.folder}: what was measured cannot be kept there ({error.strerror or error}), so this machine is measured "
            "each time; make the folder writable, or name another in ECHELON_CACHE"
        )
        return replace(cluster, notes=(*cluster.notes, note))
    return cluster


def known_cluster(*, store: Store | None = None) -> Cluster | None:
    """The machine that is here if it was measured before; never measures, never imports torch."""
    return (store or Store(cache_folder())).get(Cluster, _key(), versions=installed_versions())


def _key() -> str:
    """What makes it another machine: name, processor, cores, GPUs that this process may see."""
    gpus = sorted(path.name for path in Path("/proc/driver/nvidia/gpus").glob("*"))
    return " ".join(
        ["machine", platform.node(), _processor(), str(usable_cores()), *gpus, f"visible={visible_devices()}"]
    )


def _measured(gpus: int, progress: Progress, versions: dict[str, str]) -> Cluster:
    busy = Busy()
    kind = "cuda" if gpus else "cpu"
    loads = _loads(gpus)
    reports: list[tuple[int, int, dict[str, Any]]] = []
    for turn, (ranks, threads) in enumerate(loads):
        what = f"measuring {ranks} x {threads} threads" if kind == "cpu" else f"measuring {ranks} x {kind}"
        for count, report in enumerate(_reports(kind, ranks, threads)):
            reports.append((ranks, threads, report))
            progress(what, (turn + min(count / _REPORTS, 1.0)) / len(loads))
    progress("measured", 1.0)
    cores, memory = usable_cores(), usable_memory()
    devices = tuple(_device(kind, index, reports) for index in range(max(gpus, 1)))
    node = Node(name=platform.node() or "localhost", cores=cores, memory=memory, devices=devices, links=_links(reports))
    return Cluster(name=node.name, nodes=(node,), versions=versions, notes=busy.notes())


def _loads(gpus: int) -> list[tuple[int, int]]:
    """(processes, threads each) to measure under: alone with everything, then side by side on shares of it."""
    cores = usable_cores()
    if gpus:
        return [(1, cores)] + ([(gpus, max(cores // gpus, 1))] if gpus > 1 else [])
    return [(ranks, cores // ranks) for ranks in (1, 2, 4) if ranks <= cores]


def _device(kind: Any, index: int, reports: list[tuple[int, int, dict[str, Any]]]) -> Device:
    points: dict[tuple[str, str, int, int], dict[tuple[float, ...], float]] = {}
    single: dict[str, dict[str, Any]] = {}
    for ranks, threads, report in reports:
        if report["kind"] == "rate":
            curve = points.setdefault((report["operation"], report["dtype"], ranks, threads), {})
            curve[tuple(map(float, report["dims"]))] = report["rate"]
        elif ranks == 1:
            single.setdefault(report["kind"], report)
    curves = tuple(
        Curve(
            operation=operation,
            dtype=dtype,
            ranks=ranks,
            threads=threads,
            points=tuple(Point(dims, rate) for dims, rate in sorted(found.items())),
        )
        for (operation, dtype, ranks, threads), found in sorted(points.items())
    )
    name, memory = (_processor(), usable_memory()) if kind == "cpu" else _gpu(index)
    return Device(
        kind=kind,
        name=name,
        memory=memory,
        cores=usable_cores() if kind == "cpu" else 1,
        instructions=_instructions() if kind == "cpu" else (),
        curves=curves,
        overhead=single["overhead"]["seconds"],
        fault=single.get("fault", {}).get("seconds_per_byte", 0.0),
        framework=int(single["framework"]["bytes"]),
        grain=single["memory"]["grain"],
        retained=single["memory"]["retained"],
        workspace=single["memory"]["workspace"],
    )


def _links(reports: list[tuple[int, int, dict[str, Any]]]) -> tuple[Link, ...]:
    points: dict[tuple[Any, str, int], list[tuple[float, float]]] = {}
    overlap = {ranks: float(report["share"]) for ranks, _, report in reports if report["kind"] == "overlap"}
    for ranks, _, report in reports:
        if report["kind"] == "link":
            points.setdefault((report["operation"], report["backend"], ranks), []).append(
                (float(report["bytes"]), report["seconds"])  # a document keeps float and int apart
            )
    return tuple(
        Link(
            operation=operation,
            backend=backend,
            ranks=ranks,
            points=tuple(sorted(found)),
            overlap=overlap.get(ranks, 0.0),
        )
        for (operation, backend, ranks), found in sorted(points.items())
    )


def _reports(device: str, ranks: int, threads: int) -> Iterator[dict[str, Any]]:
    """What measuring processes report: `ranks` of them at once, each with `threads` threads."""
    with tempfile.TemporaryDirectory() as folder, _processes(device, ranks, threads, Path(folder)) as processes:
        output = processes[0].stdout
        assert output is not None
        for line in output:
            yield json.loads(line)
        for rank, process in enumerate(processes):
            if process.wait(60):
                said = (Path(folder) / f"{rank}.err").read_text(errors="replace").strip().splitlines()
                raise LaunchError(
                    f"measuring process {rank} of {ranks} ended with code {process.returncode}: {said[-1] if said else 'it said nothing'}"
                )


@contextmanager
def _processes(device: str, ranks: int, threads: int, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    environment = child_environment(threads)
    root = str(Path(__file__).resolve().parent.parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    environment["PYTHONWARNINGS"] = "ignore"
    processes = []
    try:
        for rank in range(ranks):
            settings = {
                "rank": rank, "ranks": ranks, "threads": threads, "store": str(folder / "store"), "device": device,
                "seconds": _SECONDS[device],
            }  # fmt: skip
            with open(folder / f"{rank}.err", "w") as errors:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "echelon.hardware.measure_worker", json.dumps(settings)],
                        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                        stderr=errors,
                        text=True,
                        env=environment,
                        start_new_session=True,
                        preexec_fn=die_with_parent if sys.platform == "linux" else None,
                    )
                )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


class Busy:
    """How much of the machine others use meanwhile: rates measured beside them are too low, and must say so."""

    def __init__(self) -> None:
        self._start = self._ticks()

    @staticmethod
    def _ticks() -> tuple[float, float, float]:
        """(busy, all, our children's) ticks so far."""
        try:
            words = [float(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        except (OSError, ValueError, IndexError):
            return 0.0, 0.0, 0.0
        own = os.times()
        hertz = os.sysconf("SC_CLK_TCK")
        return sum(words) - words[3] - words[4], sum(words), hertz * sum(own[:4])

    @property
    def share(self) -> float:
        """Share of the machine's cores that processes other than this one and its ended children used since the start."""
        busy, total, own = (b - a for a, b in zip(self._start, self._ticks(), strict=True))
        return max((busy - own) / total, 0.0) if total else 0.0

    def notes(self) -> tuple[str, ...]:
        """What a reader of the measurements must know."""
        share = self.share
        if share < 0.1:
            return ()
        return (
            f"other processes used {share:.0%} of the cores while this machine was measured: times forecast from it are too "
            "long; measure again (refresh) when it is quiet",
        )


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _processor() -> str:
    found = _cpuinfo()
    if "model name" in found:
        return found["model name"]
    part = found.get("cpu part", "")
    known = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}
    return known.get(part, platform.processor() or platform.machine())


def _instructions() -> tuple[str, ...]:
    found = _cpuinfo()
    words = set(f"{found.get('features', '')} {found.get('flags', '')}".split())
    names = [name for word, name in _INSTRUCTIONS.items() if word in words]
    # Whether products in a type run at speed, whatever the extension that gives it is called.
    names += ["bf16"] if {"avx512_bf16", "amx_bf16"} & words else []
    names += ["fp16"] if {"avx512_fp16", "amx_fp16"} & words else []
    return tuple(names)


def _gpus() -> list[str]:
    import torch

    return (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )


def _gpu(index: int) -> tuple[str, int]:
    import torch

    found = torch.cuda.get_device_properties(index)
    return found.name, found.total_memory
