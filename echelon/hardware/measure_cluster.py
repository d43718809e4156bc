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
from echelon.plan.cluster import Cluster, CollectiveTiming, Device, Node, RateCurve, RatePoint
from echelon.plan.document_cache import DocumentCache, installed_versions
from echelon.world import cache_folder, usable_cores, usable_memory, visible_devices

#: `progress(what, share)`: a line for people and how much is done, 0 to 1.
Progress = Callable[[str, float], None]
#: Seconds of work on trials in each measuring process at most, by device; on a busy machine it may wait longer than it works.
_MAX_SECONDS = {"cpu": 16.0, "cuda": 32.0}
#: Reports of one whole measuring process, for the progress display only.
_EXPECTED_REPORTS = 260
#: What an instruction set is called in /proc/cpuinfo -> what it is good for.
_INSTRUCTION_SETS = {
    "avx2": "avx2", "avx512f": "avx512", "avx512_bf16": "avx512-bf16", "avx512_fp16": "avx512-fp16", "avx512_vnni": "avx512-vnni",
    "amx_bf16": "amx-bf16", "amx_int8": "amx-int8", "asimd": "neon", "asimddp": "int8-dot", "asimdhp": "fp16-vector", "sve": "sve",
    "sve2": "sve2", "bf16": "bf16", "i8mm": "int8-matrix",
}  # fmt: skip


def measure(*, refresh: bool = False, store: DocumentCache | None = None, progress: Progress | None = None) -> Cluster:
    """The machine that is here. Timed once (under half a minute; a GPU: a little over one) and kept; `refresh` times it again."""
    store = store or DocumentCache(cache_folder())
    cached_cluster = None if refresh else known_cluster(store=store)
    if cached_cluster is not None:
        return cached_cluster
    versions = installed_versions()
    cluster = _measure_cluster(len(_list_gpus()), progress or (lambda message, share: None), versions)
    try:
        store.put(_compute_machine_key(), cluster, versions=versions)
    except OSError as error:
        note = (
            f"{store.folder}: what was measured cannot be kept there ({error.strerror or error}), so this machine is measured "
            "each time; make the folder writable, or name another in ECHELON_CACHE"
        )
        return replace(cluster, notes=(*cluster.notes, note))
    return cluster


def known_cluster(*, store: DocumentCache | None = None) -> Cluster | None:
    """The machine that is here if it was measured before; never measures, never imports torch."""
    return (store or DocumentCache(cache_folder())).get(Cluster, _compute_machine_key(), versions=installed_versions())


def _compute_machine_key() -> str:
    """What makes it another machine: name, processor, cores, GPUs that this process may see."""
    gpus = sorted(path.name for path in Path("/proc/driver/nvidia/gpus").glob("*"))
    return " ".join(
        ["machine", platform.node(), _read_processor_name(), str(usable_cores()), *gpus, f"visible={visible_devices()}"]
    )


def _measure_cluster(num_gpus: int, progress: Progress, versions: dict[str, str]) -> Cluster:
    background_load = BackgroundLoad()
    device_kind = "cuda" if num_gpus else "cpu"
    loads = _list_process_loads(num_gpus)
    reports: list[tuple[int, int, dict[str, Any]]] = []
    for load_index, (ranks, threads) in enumerate(loads):
        message = (
            f"measuring {ranks} x {threads} threads" if device_kind == "cpu" else f"measuring {ranks} x {device_kind}"
        )
        for report_index, report in enumerate(_run_workers(device_kind, ranks, threads)):
            reports.append((ranks, threads, report))
            progress(message, (load_index + min(report_index / _EXPECTED_REPORTS, 1.0)) / len(loads))
    progress("measured", 1.0)
    cores, memory = usable_cores(), usable_memory()
    devices = tuple(_build_device(device_kind, index, reports) for index in range(max(num_gpus, 1)))
    node = Node(
        name=platform.node() or "localhost", cores=cores, memory=memory, devices=devices, links=_build_links(reports)
    )
    return Cluster(name=node.name, nodes=(node,), versions=versions, notes=background_load.notes())


def _list_process_loads(num_gpus: int) -> list[tuple[int, int]]:
    """(processes, threads each) to measure under: alone with everything, then side by side on shares of it."""
    cores = usable_cores()
    if num_gpus:
        return [(1, cores)] + ([(num_gpus, max(cores // num_gpus, 1))] if num_gpus > 1 else [])
    return [(ranks, cores // ranks) for ranks in (1, 2, 4) if ranks <= cores]


def _build_device(device_kind: Any, index: int, reports: list[tuple[int, int, dict[str, Any]]]) -> Device:
    points: dict[tuple[str, str, int, int], dict[tuple[float, ...], float]] = {}
    single_process_reports: dict[str, dict[str, Any]] = {}
    for ranks, threads, report in reports:
        if report["kind"] == "rate":
            curve = points.setdefault((report["operation"], report["dtype"], ranks, threads), {})
            curve[tuple(map(float, report["dims"]))] = report["rate"]
        elif ranks == 1:
            single_process_reports.setdefault(report["kind"], report)
    curves = tuple(
        RateCurve(
            operation=operation,
            dtype=dtype,
            ranks=ranks,
            threads=threads,
            points=tuple(RatePoint(dims, rate) for dims, rate in sorted(rates_by_dims.items())),
        )
        for (operation, dtype, ranks, threads), rates_by_dims in sorted(points.items())
    )
    name, memory = (_read_processor_name(), usable_memory()) if device_kind == "cpu" else _describe_gpu(index)
    return Device(
        kind=device_kind,
        name=name,
        memory=memory,
        cores=usable_cores() if device_kind == "cpu" else 1,
        instructions=_list_instructions() if device_kind == "cpu" else (),
        curves=curves,
        overhead=single_process_reports["overhead"]["seconds"],
        page_fault_seconds=single_process_reports.get("fault", {}).get("seconds_per_byte", 0.0),
        framework=int(single_process_reports["framework"]["bytes"]),
        block_padding=single_process_reports["memory"]["grain"],
        retained=single_process_reports["memory"]["retained"],
        workspace=single_process_reports["memory"]["workspace"],
    )


def _build_links(reports: list[tuple[int, int, dict[str, Any]]]) -> tuple[CollectiveTiming, ...]:
    points: dict[tuple[Any, str, int], list[tuple[float, float]]] = {}
    overlap = {ranks: float(report["share"]) for ranks, _, report in reports if report["kind"] == "overlap"}
    for ranks, _, report in reports:
        if report["kind"] == "link":
            points.setdefault((report["operation"], report["backend"], ranks), []).append(
                (float(report["bytes"]), report["seconds"])  # a document keeps float and int apart
            )
    return tuple(
        CollectiveTiming(
            operation=operation,
            backend=backend,
            ranks=ranks,
            points=tuple(sorted(timings)),
            overlap=overlap.get(ranks, 0.0),
        )
        for (operation, backend, ranks), timings in sorted(points.items())
    )


def _run_workers(device: str, ranks: int, threads: int) -> Iterator[dict[str, Any]]:
    """What measuring processes report: `ranks` of them at once, each with `threads` threads."""
    with tempfile.TemporaryDirectory() as folder, _worker_processes(device, ranks, threads, Path(folder)) as processes:
        output = processes[0].stdout
        assert output is not None
        for line in output:
            yield json.loads(line)
        for rank, process in enumerate(processes):
            if process.wait(60):
                error_lines = (Path(folder) / f"{rank}.err").read_text(errors="replace").strip().splitlines()
                raise LaunchError(
                    f"measuring process {rank} of {ranks} ended with code {process.returncode}: {error_lines[-1] if error_lines else 'it said nothing'}"
                )


@contextmanager
def _worker_processes(device: str, ranks: int, threads: int, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    environment = child_environment(threads)
    root = str(Path(__file__).resolve().parent.parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    environment["PYTHONWARNINGS"] = "ignore"
    processes = []
    try:
        for rank in range(ranks):
            settings = {
                "rank": rank, "ranks": ranks, "threads": threads, "store": str(folder / "store"), "device": device,
                "seconds": _MAX_SECONDS[device],
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


class BackgroundLoad:
    """How much of the machine others use meanwhile: rates measured beside them are too low, and must say so."""

    def __init__(self) -> None:
        self._start_ticks = self._read_ticks()

    @staticmethod
    def _read_ticks() -> tuple[float, float, float]:
        """(busy, all, our children's) ticks so far."""
        try:
            counters = [float(counter) for counter in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        except (OSError, ValueError, IndexError):
            return 0.0, 0.0, 0.0
        process_times = os.times()
        ticks_per_second = os.sysconf("SC_CLK_TCK")
        return sum(counters) - counters[3] - counters[4], sum(counters), ticks_per_second * sum(process_times[:4])

    @property
    def share(self) -> float:
        """Share of the machine's cores that processes other than this one and its ended children used since the start."""
        busy_ticks, total_ticks, own_ticks = (
            now - start for start, now in zip(self._start_ticks, self._read_ticks(), strict=True)
        )
        return max((busy_ticks - own_ticks) / total_ticks, 0.0) if total_ticks else 0.0

    def notes(self) -> tuple[str, ...]:
        """What a reader of the measurements must know."""
        share = self.share
        if share < 0.1:
            return ()
        return (
            f"other processes used {share:.0%} of the cores while this machine was measured: times forecast from it are too "
            "long; measure again (refresh) when it is quiet",
        )


def _read_cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _read_processor_name() -> str:
    cpuinfo = _read_cpuinfo()
    if "model name" in cpuinfo:
        return cpuinfo["model name"]
    part_number = cpuinfo.get("cpu part", "")
    names_by_part = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}
    return names_by_part.get(part_number, platform.processor() or platform.machine())


def _list_instructions() -> tuple[str, ...]:
    cpuinfo = _read_cpuinfo()
    flags = set(f"{cpuinfo.get('features', '')} {cpuinfo.get('flags', '')}".split())
    names = [name for flag, name in _INSTRUCTION_SETS.items() if flag in flags]
    # Whether products in a type run at speed, whatever the extension that gives it is called.
    names += ["bf16"] if {"avx512_bf16", "amx_bf16"} & flags else []
    names += ["fp16"] if {"avx512_fp16", "amx_fp16"} & flags else []
    return tuple(names)


def _list_gpus() -> list[str]:
    import torch

    return (
        [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )


def _describe_gpu(index: int) -> tuple[str, int]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return properties.name, properties.total_memory
