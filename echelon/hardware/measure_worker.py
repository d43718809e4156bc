"""A measuring process: times operators, optimizers, page faults and, with others, collectives. Prints JSON lines.

It runs outside the caller's process, whose threads, allocator state and other work would distort the figures. Several workers measure at the
same time to include the effect of a shared memory bus.

    python -m echelon.hardware.measure_worker '{"rank": 0, "ranks": 2, "threads": 1, "store": "/tmp/...", "device": "cpu"}'
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.hardware.benchmark_ops import BenchmarkCall, iterate_benchmarks, iterate_tf32_benchmarks
from echelon.hardware.launch_overhead import LaunchTimer
from echelon.plan.cluster import allocated_bytes
from echelon.plan.profile import rate_dims
from echelon.trials.op_recorder import OpCall, OpRecorder, make_gradient_hook, record_ops

#: Seconds that a benchmark is repeated for at most; one repetition at least.
_MAX_REPEAT_SECONDS = {"cpu": 0.025, "cuda": 0.01}
#: Seconds that a 4096 x 4096 matrix product takes at least, on the fastest GPUs.
_FILLER_SECONDS = 1e-4
_MESSAGE_BYTES = (2**12, 2**16, 2**20, 2**23, 2**25)


class MeasureWorker:
    def __init__(self, *, rank: int, ranks: int, threads: int, store: str, device: str, seconds: float) -> None:
        self.rank, self.ranks, self.threads, self.device = rank, ranks, threads, device
        self._max_seconds = seconds
        torch.set_num_threads(threads)
        if device == "cuda":
            torch.cuda.set_device(rank)
        if ranks > 1:
            backend = "nccl" if device == "cuda" else "gloo"
            timeout = timedelta(seconds=60)  # if one process dies, the others must not wait for half an hour
            dist.init_process_group(backend, f"file://{store}", timeout, rank=rank, world_size=ranks)

    def run(self) -> None:
        """Measure everything and report it."""
        run_reference_step(self.device, 8, 16)
        self.report("framework", bytes=_read_framework_bytes(self.device))
        if self.ranks == 1:
            self.report("memory", **self._measure_memory())
        if self.device == "cpu":
            self.report("fault", seconds_per_byte=_measure_page_fault_cost(self.threads))
        self.report("overhead", seconds=self._measure_overhead())
        if self.device == "cuda":
            self._launch_timer.time_all()
        cpu_deadline = time.process_time() + self._max_seconds * self.threads
        wall_deadline = time.monotonic() + 2.5 * self._max_seconds
        for benchmark in iterate_benchmarks(self.device):
            # On a busy machine the time runs out; missing rates are interpolated.
            if self._reduce_min(min(cpu_deadline - time.process_time(), wall_deadline - time.monotonic())) > 0:
                self._measure_rate(benchmark)
        if self.device == "cuda":
            self._launch_timer.time_all()
            torch.set_float32_matmul_precision("high")
            for benchmark in iterate_tf32_benchmarks(self.device):
                self._measure_rate(benchmark, dtype="tf32")
            torch.set_float32_matmul_precision("highest")
            self._measure_host()
        self._measure_optimizers()
        if self.ranks > 1:
            self._measure_links()

    def report(self, kind: str, **fields: Any) -> None:
        """Report one figure. Only rank 0 prints: all ranks do the same at the same time."""
        if self.rank == 0:
            print(json.dumps({"kind": kind, **fields}), flush=True)  # noqa: T201

    def report_rate(self, operation: str, rate: float, dims: Sequence[float] = (1.0,), dtype: str = "float32") -> None:
        """Report a point of a rate curve."""
        self.report("rate", operation=operation, dtype=dtype, dims=dims, rate=rate)

    def time_call(self, call: Callable[[], object], *, synchronous: bool = False, is_warm: bool = False) -> float:
        """Seconds of one call: the lower quartile of repetitions, since disturbances only ever add.

        `synchronous`: it is a collective, or the host's own time counts; `is_warm`: it has run before.
        """
        if not is_warm:
            call()
        self._synchronize()
        if self.device == "cuda" and not synchronous:
            return self._time_on_gpu(call)
        if self.ranks > 1:
            dist.barrier()
        first_seconds = self._time_once(call, 1, synchronous)
        # Ranks repeat equally often: the call may be a collective.
        repeats = int(self._reduce_min(_count_repeats(_MAX_REPEAT_SECONDS[self.device], first_seconds, 200)))
        group_size = max(repeats // 8, 1)  # short calls are timed in groups, so that the clock itself does not count
        timings = [self._time_once(call, group_size, synchronous) for _ in range(max(repeats // group_size, 1))]
        return sorted([first_seconds, *timings])[(len(timings) + 1) // 4]

    def _time_on_gpu(self, call: Callable[[], object]) -> float:
        """Seconds of one call on the GPU alone: filler work keeps it busy while the host runs ahead, so that launches do not count."""
        matrix = self._filler_matrix
        timings: list[float] = []
        host_seconds, device_seconds = 1e-4, 1e-4
        for round_index in range(4):
            repeats = _count_repeats(_MAX_REPEAT_SECONDS["cuda"] / 4, device_seconds, 20) if round_index else 1
            for _ in range(min(int(1.5 * host_seconds * repeats / _FILLER_SECONDS) + 1, 40)):
                torch.mm(matrix, matrix)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            host_start = time.perf_counter()
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            host_seconds = (time.perf_counter() - host_start) / repeats
            torch.cuda.synchronize()
            device_seconds = start.elapsed_time(end) / 1e3 / repeats
            if round_index:
                timings.append(device_seconds)
            if device_seconds * repeats > 2 * _MAX_REPEAT_SECONDS["cuda"] and timings:
                break
        return max(sorted(timings)[len(timings) // 4], 1e-7)

    @cached_property
    def _launch_timer(self) -> LaunchTimer:
        return LaunchTimer()

    @cached_property
    def _filler_matrix(self) -> Tensor:
        return torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16).normal_()

    def _time_once(self, call: Callable[[], object], repeats: int, synchronous: bool) -> float:
        wall_clock_only = self.device == "cuda" or synchronous
        queued_before = 0.0 if wall_clock_only else read_queued_seconds()
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            call()
        self._synchronize()
        wall_seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        if wall_clock_only:
            return wall_seconds / repeats
        # Time spent queueing for a core belongs to other processes; but the call cannot be faster than its own work shared evenly.
        return max(wall_seconds - (read_queued_seconds() - queued_before), cpu_seconds / self.threads) / repeats

    def _reduce_min(self, value: float) -> float:
        if self.ranks == 1:
            return value
        vote = torch.tensor(float(value), device=self.device)
        dist.all_reduce(vote, dist.ReduceOp.MIN)
        return vote.item()

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _measure_rate(self, benchmark: BenchmarkCall, dtype: str = "") -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False), OpRecorder(1) as recorder:
                benchmark()
            # A call may also copy or reshape: its main operator names it.
            op_call = max(recorder.trace.calls, key=lambda candidate: (candidate.flops, candidate.moved_bytes))
            if self.device == "cuda":
                self._measure_workspace(benchmark, op_call, dtype)
            seconds = self.time_call(benchmark, is_warm=True)
        except (RuntimeError, NotImplementedError, ValueError) as error:  # this build lacks the operator or dtype
            self.report("skipped", reason=str(error).splitlines()[0][:120])
            return
        if op_call.kind != "stream":
            work, dims = op_call.flops, rate_dims(op_call.kind, op_call.dims)
        else:  # on a CPU the layout does not matter
            work, dims = op_call.moved_bytes, (op_call.dims if self.device == "cuda" else ()) or (op_call.moved_bytes,)
        self.report_rate(op_call.name, work / seconds, dims, dtype or op_call.dtype)

    def _measure_workspace(self, benchmark: BenchmarkCall, op_call: OpCall, dtype: str) -> None:
        """Bytes that a call allocates temporarily, its outputs aside, per byte that it moves."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated_before = torch.cuda.memory_allocated()
        benchmark()
        workspace_bytes = torch.cuda.max_memory_allocated() - allocated_before - op_call.allocated_bytes
        # The allocator may leave up to a megabyte of a block unused: that is no workspace.
        if workspace_bytes > max(0.02 * op_call.moved_bytes, 2**21):
            moved = op_call.moved_bytes
            self.report_rate(f"workspace {op_call.name}", workspace_bytes / moved, [moved], dtype or op_call.dtype)

    def _measure_memory(self) -> dict[str, float]:
        """What a process holds in addition to its live tensors."""
        if self.device == "cuda":
            # The allocator's own count is exact; libraries take a workspace from it for good.
            torch.cuda.reset_peak_memory_stats()
            fixed, transient, peak = run_reference_step(self.device, 1024, 128)
            return {"grain": 0.0, "retained": 0.0, "workspace": max(peak - fixed - transient, 0.0)}
        block_bytes, resident_before = 16 * 2**20, _read_process_status("VmRSS")
        blocks = [torch.ones(block_bytes // 4) for _ in range(8)]
        grain = max((_read_process_status("VmRSS") - resident_before) / len(blocks) - block_bytes, 0.0)
        del blocks
        fixed, transient, peak = run_reference_step(self.device, 1024, 128)
        retained = max(peak - resident_before - allocated_bytes(fixed + transient, 10**9, grain), 0.0)
        return {"grain": grain, "retained": retained / transient, "workspace": 0.0}

    def _measure_overhead(self) -> float:
        layers = nn.Sequential(*[part for _ in range(24) for part in (nn.Linear(4, 4), nn.ReLU())]).to(self.device)
        x = torch.ones(1, 4, device=self.device)

        def run_step() -> None:
            layers(x).sum().backward()
            layers.zero_grad()

        run_step()
        with torch.autograd.set_multithreading_enabled(False), OpRecorder(1) as recorder:
            run_step()
        return self.time_call(run_step, synchronous=self.device == "cuda") / len(recorder.trace.calls)

    def _measure_host(self) -> None:
        """How many operators the host launches per second, and how many tensors per second an optimizer step takes."""
        self._launch_timer.time_all()
        for quantity, seconds in self._launch_timer.compute_medians().items():
            self.report_rate(quantity, 1 / seconds)
        parameters = _make_parameters([(8, 8)] * 200, self.device)
        for fused in (True, False):
            step = torch.optim.AdamW(parameters, lr=1e-9, fused=fused).step
            name = "host optimizer" + (":fused" if fused else "")
            self.report_rate(name, len(parameters) / self.time_call(step, synchronous=True))

    def _measure_optimizers(self) -> None:
        shapes = [(4096, 4096)] * 4 if self.device == "cuda" else [(1024, 1024)] * 4
        optimizers: dict[str, Any] = {
            "AdamW": torch.optim.AdamW,
            "SGD": partial(torch.optim.SGD, momentum=0.9),
            "Adagrad": torch.optim.Adagrad,
            "plain-SGD": torch.optim.SGD,
        }
        for (name, make_optimizer), fused in product(optimizers.items(), (True, False)):
            parameters = _make_parameters(shapes, self.device)
            try:
                seconds = self.time_call(make_optimizer(parameters, lr=1e-9, fused=fused).step)
            except RuntimeError:  # Adagrad has no fused kernel on CUDA
                continue
            elements = sum(parameter.numel() for parameter in parameters)
            self.report_rate(name + (":fused" if fused else ""), elements / seconds, [elements])

    def _measure_links(self) -> None:
        for message_bytes in _MESSAGE_BYTES:
            message = torch.ones(message_bytes // 4, device=self.device)
            shard = torch.ones(message_bytes // 4 // self.ranks, device=self.device)
            full_tensor = torch.ones(shard.numel() * self.ranks, device=self.device)
            calls: dict[str, Callable[[], object]] = {
                "all_reduce": partial(dist.all_reduce, message),
                "reduce_scatter": partial(_reduce_scatter, shard, full_tensor),
                "all_gather": partial(dist.all_gather_into_tensor, full_tensor, shard),
            }
            link = {"backend": dist.get_backend(), "ranks": self.ranks, "bytes": message_bytes}
            for name, call in calls.items():
                self.report("link", operation=name, seconds=self.time_call(call, synchronous=True), **link)
        # On a CPU the ranks use all cores: one that copies a message cannot compute.
        overlap = self._measure_overlap() if self.device == "cuda" else 0.0
        self.report("overlap", operation="all_reduce", share=overlap)

    def _measure_overlap(self) -> float:
        message = torch.ones(2**22, device=self.device)
        matrix = torch.ones(1024, 1024, device=self.device)

        def compute() -> None:
            for _ in range(4):
                torch.mm(matrix, matrix)

        def compute_and_communicate() -> None:
            work = dist.all_reduce(message, async_op=True)
            compute()
            work.wait()

        calls = (compute, partial(dist.all_reduce, message), compute_and_communicate)
        computing, communicating, both = (self.time_call(call, synchronous=True) for call in calls)
        return min(max((computing + communicating - both) / min(computing, communicating), 0.0), 1.0)


def _count_repeats(max_seconds: float, seconds: float, most: int) -> int:
    return max(min(int(max_seconds / max(seconds, 1e-6)), most), 1)


def _make_parameters(shapes: Sequence[tuple[int, ...]], device: str) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.ones(shape, device=device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def _reduce_scatter(shard: Tensor, full_tensor: Tensor) -> object:
    # torch 2.13 renames it and warns about the old name.
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(shard, full_tensor)


def run_reference_step(device: str, width: int, samples: int) -> tuple[float, float, float]:
    """Train a small network; (bytes that persist between steps, peak of the transient bytes as recorded, peak bytes of the process)."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width), nn.ReLU()]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.ones(samples, width, device=device)
    for _ in range(2):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    peak_bytes = _read_process_status("VmHWM") if device == "cpu" else float(torch.cuda.max_memory_allocated())
    with record_ops(model, samples) as recorder, torch.autograd.set_multithreading_enabled(False):
        for parameter in model.parameters():
            recorder.ignore_storage(parameter)
            parameter.register_post_accumulate_grad_hook(make_gradient_hook(recorder))
        recorder.track_storage(inputs)
        model(inputs).square().mean().backward()
    transient_bytes = max(op_call.alive_bytes + op_call.gradient_bytes for op_call in recorder.trace.calls)
    return 3 * parameter_bytes, max(transient_bytes, parameter_bytes), peak_bytes


def _measure_page_fault_cost(threads: int) -> float:
    """Seconds per byte that the first touch of freshly allocated memory costs: page faults on what the allocator had returned to the system.

    In CPU time over all threads: wall-clock time is mostly noise here.
    """
    num_bytes, costs = 32 * 2**20, []
    for _ in range(6):
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        start = time.process_time()
        memory.fill_(1)
        first_touch = time.process_time() - start
        start = time.process_time()
        memory.fill_(2)
        costs.append(max(first_touch - (time.process_time() - start), 0.0) / num_bytes / threads)
        del memory
        time.sleep(0.03)  # allocators return memory after a delay
        torch.empty(2**16)  # and at the next allocation
    return sorted(costs[1:])[2]


def read_queued_seconds(*, main_thread_only: bool = False) -> float:
    """Seconds that this process's threads (or its main one) have waited for a core; 0 where the kernel does not count."""
    queued_nanoseconds = 0
    with contextlib.suppress(FileNotFoundError):
        for task in [str(os.getpid())] if main_thread_only else os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended, or nothing is counted
                queued_nanoseconds += int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1])
    return queued_nanoseconds / 1e9


def _read_process_status(name: str) -> float:
    with open("/proc/self/status") as file:
        return next(float(line.split()[1]) * 1024 for line in file if line.startswith(name))


def _read_framework_bytes(device: str) -> float:
    """What the process holds without a model: on a GPU, the driver's and libraries' memory outside the allocator."""
    if device == "cpu":
        return _read_process_status("VmRSS")
    free, total = torch.cuda.mem_get_info()
    return float(total - free - torch.cuda.memory_reserved())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    MeasureWorker(**json.loads(sys.argv[1])).run()
    # Skip Python's shutdown: threads of the process group that still run would abort the process.
    sys.stdout.flush()
    os._exit(0)
