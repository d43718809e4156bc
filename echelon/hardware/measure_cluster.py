"""Measure this machine as a Cluster, in worker processes."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
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

#: `progress(message, fraction)`: what is being done, and how much is done already, 0 to 1.
Progress = Callable[[str, float], None]
#: CPU seconds that each worker spends on benchmarks at most, by device; on a busy machine it may wait longer than it works.
_MAX_SECONDS = {"cpu": 16.0, "cuda": 32.0}
#: (ranks, threads, report of a worker)
_Report = tuple[int, int, dict[str, Any]]
#: Reports of one worker, for the progress display only.
_EXPECTED_REPORTS = 260
#: Instruction sets by their flag in /proc/cpuinfo.
_INSTRUCTION_SETS = {
    "avx2": "avx2", "avx512f": "avx512", "avx512_bf16": "avx512-bf16", "avx512_fp16": "avx512-fp16", "avx512_vnni": "avx512-vnni",
    "amx_bf16": "amx-bf16", "amx_int8": "amx-int8", "asimd": "neon", "asimddp": "int8-dot", "asimdhp": "fp16-vector", "sve": "sve",
    "sve2": "sve2", "bf16": "bf16", "i8mm": "int8-matrix",
}  # fmt: skip


def measure(*, refresh: bool = False, store: DocumentCache | None = None, progress: Progress | None = None) -> Cluster:
    """This machine. Measured once (under half a minute; a GPU: a little over one) and cached; `refresh` measures again."""
    store = store or DocumentCache(cache_folder())
    cached_cluster = None if refresh else known_cluster(store=store)
    if cached_cluster is not None:
        return cached_cluster
    versions = installed_versions()
    cluster = _measure_cluster(_count_gpus(), progress or (lambda message, share: None), versions)
    try:
        store.put(_compute_machine_key(), cluster, versions=versions)
    except OSError as error:
        note = (
            f"{store.folder}: measurements cannot be cached there ({error.strerror or error}), so this machine is measured "
            "each time; make the folder writable, or set ECHELON_CACHE to another one"
        )
        return replace(cluster, notes=(*cluster.notes, note))
    return cluster


def known_cluster(*, store: DocumentCache | None = None) -> Cluster | None:
    """This machine if it was measured before; never measures, never imports torch."""
    return (store or DocumentCache(cache_folder())).get(Cluster, _compute_machine_key(), versions=installed_versions())


def _compute_machine_key() -> str:
    gpus = sorted(path.name for path in Path("/proc/driver/nvidia/gpus").glob("*"))
    parts = ["machine", platform.node(), _read_processor_name(), str(usable_cores()), *gpus]
    return " ".join([*parts, f"visible={visible_devices()}"])


def _measure_cluster(num_gpus: int, progress: Progress, versions: dict[str, str]) -> Cluster:
    background_load = BackgroundLoad()
    device_kind = "cuda" if num_gpus else "cpu"
    loads = _list_process_loads(num_gpus)
    reports: list[_Report] = []
    for load_index, (ranks, threads) in enumerate(loads):
        message = f"measuring {ranks} x {f'{threads} threads' if device_kind == 'cpu' else device_kind}"
        for report_index, report in enumerate(_run_workers(device_kind, ranks, threads)):
            reports.append((ranks, threads, report))
            progress(message, (load_index + min(report_index / _EXPECTED_REPORTS, 1.0)) / len(loads))
    progress("measured", 1.0)
    cores, memory, name = usable_cores(), usable_memory(), platform.node() or "localhost"
    devices = tuple(_build_device(device_kind, index, reports) for index in range(max(num_gpus, 1)))
    node = Node(name=name, cores=cores, memory=memory, devices=devices, links=_build_links(reports))
    return Cluster(name=name, nodes=(node,), versions=versions, notes=background_load.notes())


def _list_process_loads(num_gpus: int) -> list[tuple[int, int]]:
    """(processes, threads each) to measure with: one process alone, then several at the same time."""
    cores = usable_cores()
    if num_gpus:
        return [(1, cores)] + ([(num_gpus, max(cores // num_gpus, 1))] if num_gpus > 1 else [])
    return [(ranks, cores // ranks) for ranks in (1, 2, 4) if ranks <= cores]


def _build_device(device_kind: Any, index: int, reports: Sequence[_Report]) -> Device:
    rates_by_curve: dict[tuple[str, str, int, int], dict[tuple[float, ...], float]] = {}
    first_report: dict[str, dict[str, Any]] = {}  # of a single process, by kind
    for ranks, threads, report in reports:
        if report["kind"] == "rate":
            rates = rates_by_curve.setdefault((report["operation"], report["dtype"], ranks, threads), {})
            rates[tuple(map(float, report["dims"]))] = report["rate"]
        elif ranks == 1:
            first_report.setdefault(report["kind"], report)
    curves = tuple(
        RateCurve(
            operation=operation, dtype=dtype, ranks=ranks, threads=threads,
            points=tuple(RatePoint(dims, rate) for dims, rate in sorted(rates.items())),
        )
        for (operation, dtype, ranks, threads), rates in sorted(rates_by_curve.items())
    )  # fmt: skip
    is_cpu = device_kind == "cpu"
    name, memory = (_read_processor_name(), usable_memory()) if is_cpu else _describe_gpu(index)
    return Device(
        kind=device_kind,
        name=name,
        memory=memory,
        cores=usable_cores() if is_cpu else 1,
        instructions=_list_instructions() if is_cpu else (),
        curves=curves,
        overhead=first_report["overhead"]["seconds"],
        page_fault_seconds=first_report.get("fault", {}).get("seconds_per_byte", 0.0),
        framework=int(first_report["framework"]["bytes"]),
        block_padding=first_report["memory"]["grain"],
        retained=first_report["memory"]["retained"],
        workspace=first_report["memory"]["workspace"],
    )


def _build_links(reports: Sequence[_Report]) -> tuple[CollectiveTiming, ...]:
    points: dict[tuple[Any, str, int], list[tuple[float, float]]] = {}
    overlap = {ranks: float(report["share"]) for ranks, _, report in reports if report["kind"] == "overlap"}
    for ranks, _, report in reports:
        if report["kind"] == "link":
            timings = points.setdefault((report["operation"], report["backend"], ranks), [])
            timings.append((float(report["bytes"]), report["seconds"]))  # documents distinguish float from int
    return tuple(
        CollectiveTiming(
            operation=operation, backend=backend, ranks=ranks, points=tuple(sorted(timings)), overlap=overlap.get(ranks, 0.0)
        )
        for (operation, backend, ranks), timings in sorted(points.items())
    )  # fmt: skip


def _run_workers(device: str, ranks: int, threads: int) -> Iterator[dict[str, Any]]:
    """The reports of `ranks` concurrent workers with `threads` threads each."""
    with tempfile.TemporaryDirectory() as folder, _worker_processes(device, ranks, threads, Path(folder)) as processes:
        output = processes[0].stdout
        assert output is not None
        for line in output:
            yield json.loads(line)
        for rank, process in enumerate(processes):
            if process.wait(60):
                stderr = (Path(folder) / f"{rank}.err").read_text(errors="replace").strip()
                cause = stderr.splitlines()[-1] if stderr else "no output"
                raise LaunchError(f"worker {rank} of {ranks} exited with code {process.returncode}: {cause}")


@contextmanager
def _worker_processes(device: str, ranks: int, threads: int, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    environment = child_environment(threads) | {"PYTHONWARNINGS": "ignore"}
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    settings = {"ranks": ranks, "threads": threads, "store": str(folder / "store"), "device": device}
    settings["seconds"] = _MAX_SECONDS[device]
    processes = []
    try:
        for rank in range(ranks):
            command = [sys.executable, "-m", "echelon.hardware.measure_worker", json.dumps({"rank": rank, **settings})]
            with open(folder / f"{rank}.err", "w") as errors:
                process = subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=errors,
                    text=True,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=die_with_parent if sys.platform == "linux" else None,
                )
            processes.append(process)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


class BackgroundLoad:
    """How much of the machine other processes use meanwhile: rates measured next to them are too low."""

    def __init__(self) -> None:
        self._start_ticks = self._read_ticks()

    @staticmethod
    def _read_ticks() -> tuple[float, float, float]:
        """(busy, total, our own and our children's) ticks so far."""
        try:
            counters = [float(counter) for counter in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        except (OSError, ValueError, IndexError):
            return 0.0, 0.0, 0.0
        own_ticks = os.sysconf("SC_CLK_TCK") * sum(os.times()[:4])
        return sum(counters) - counters[3] - counters[4], sum(counters), own_ticks

    @property
    def share(self) -> float:
        """Share of the cores that processes other than this one and its finished children have used."""
        busy, total, own = (now - start for start, now in zip(self._start_ticks, self._read_ticks(), strict=True))
        return max((busy - own) / total, 0.0) if total else 0.0

    def notes(self) -> tuple[str, ...]:
        """A warning where the load distorts measurements."""
        share = self.share
        if share < 0.1:
            return ()
        consequence = "forecasts from it are too slow; measure again (refresh) on an idle machine"
        return (f"other processes used {share:.0%} of the cores while this machine was measured: {consequence}",)


def _read_cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _read_processor_name() -> str:
    cpuinfo = _read_cpuinfo()
    arm_names = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}
    name = cpuinfo.get("model name", arm_names.get(cpuinfo.get("cpu part", "")))
    return name if name is not None else platform.processor() or platform.machine()


def _list_instructions() -> tuple[str, ...]:
    cpuinfo = _read_cpuinfo()
    flags = set(f"{cpuinfo.get('features', '')} {cpuinfo.get('flags', '')}".split())
    names = [name for flag, name in _INSTRUCTION_SETS.items() if flag in flags]
    # The dtypes whose matrix products run at full speed, whatever the extension is called.
    names += ["bf16"] if {"avx512_bf16", "amx_bf16"} & flags else []
    names += ["fp16"] if {"avx512_fp16", "amx_fp16"} & flags else []
    return tuple(names)


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _describe_gpu(index: int) -> tuple[str, int]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return properties.name, properties.total_memory
