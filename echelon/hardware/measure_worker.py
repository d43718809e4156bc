"""One measuring process: times operators, the optimizer, fresh memory and, with others, the links. Prints JSON lines.

Measured apart from the caller's process: its threads, its allocator's state and its other work stay out of it. Several
such processes measure at the same moment where ranks share a memory bus.

    python -m echelon.hardware.measure_worker '{"rank": 0, "ranks": 2, "threads": 1, "store": "/tmp/...", "device": "cpu"}'
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.hardware.benchmark_ops import BenchmarkCall, iterate_benchmarks, iterate_tf32_benchmarks
from echelon.hardware.launch_overhead import LaunchTimer
from echelon.plan.cluster import allocated_bytes
from echelon.plan.profile import rate_dims
from echelon.trials.op_recorder import OpCall, OpRecorder, make_gradient_hook, record_ops

#: Seconds that one trial is repeated for, at most; one repetition at least.
_MAX_REPEAT_SECONDS = {"cpu": 0.025, "cuda": 0.01}
#: Seconds that one product of 4096 x 4096 takes on the fastest GPUs at least.
_FILLER_SECONDS = 1e-4
_MESSAGE_BYTES = (2**12, 2**16, 2**20, 2**23, 2**25)


class MeasureWorker:
    """This process among those that measure together."""

    def __init__(self, *, rank: int, ranks: int, threads: int, store: str, device: str, seconds: float) -> None:
        self.rank, self.ranks, self.threads, self.device = rank, ranks, threads, device
        self._max_seconds = seconds
        torch.set_num_threads(threads)
        if device == "cuda":
            torch.cuda.set_device(rank)
        if ranks > 1:
            backend = "nccl" if device == "cuda" else "gloo"
            # A short timeout: if one process dies the others must not wait for half an hour.
            dist.init_process_group(
                backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
            )

    def run(self) -> None:
        """Measure everything and report it."""
        run_reference_step(self.device, 8, 16)
        self.report(kind="framework", bytes=_read_framework_bytes(self.device))
        if self.ranks == 1:
            self.report(kind="memory", **self._measure_memory())
        if self.device == "cpu":
            self.report(kind="fault", seconds_per_byte=_measure_page_fault_cost(self.threads))
        self.report(kind="overhead", seconds=self._measure_overhead())
        if self.device == "cuda":
            self._launch_timer.time_all()
        cpu_deadline, wall_deadline = (
            time.process_time() + self._max_seconds * self.threads,
            time.monotonic() + 2.5 * self._max_seconds,
        )
        for benchmark in iterate_benchmarks(self.device):
            # On a machine that is busy with other things the time runs out; rates are then read off neighbouring points.
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

    def report(self, **fields: Any) -> None:
        """Report one figure (rank 0 speaks: the ranks do the same at the same time)."""
        if self.rank == 0:
            sys.stdout.write(json.dumps(fields) + "\n")
            sys.stdout.flush()

    def time_call(self, call: Callable[[], object], *, synchronous: bool = False, is_warm: bool = False) -> float:
        """Seconds of one call: the lower quartile of repetitions, since disturbances only ever add.

        `synchronous`: it is a message, or the host's own time counts; `is_warm`: it ran before.
        """
        if not is_warm:
            call()
        self._synchronize()
        if self.device == "cuda" and not synchronous:
            return self._time_on_gpu(call)
        if self.ranks > 1:
            dist.barrier()
        first_seconds = self._time_once(call, 1, synchronous)
        # The ranks repeat equally often: what they time may be a collective.
        repeats = int(
            self._reduce_min(max(min(int(_MAX_REPEAT_SECONDS[self.device] / max(first_seconds, 1e-6)), 200), 1))
        )
        group_size = max(repeats // 8, 1)  # short calls are timed in groups, so that the clock itself does not count
        timings = [
            first_seconds,
            *(self._time_once(call, group_size, synchronous) for _ in range(max(repeats // group_size, 1))),
        ]
        return sorted(timings)[len(timings) // 4]

    def _time_on_gpu(self, call: Callable[[], object]) -> float:
        """Seconds of one call on the GPU alone: it is kept busy meanwhile with other work, so that its host runs ahead and launches do not count."""
        matrix = self._filler_matrix
        timings: list[float] = []
        host_seconds, device_seconds = 1e-4, 1e-4
        for round_index in range(4):
            repeats = (
                max(min(int(_MAX_REPEAT_SECONDS["cuda"] / 4 / max(device_seconds, 1e-6)), 20), 1) if round_index else 1
            )
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
        queued_before, start, cpu_seconds = (
            0.0 if wall_clock_only else read_queued_seconds(),
            time.perf_counter(),
            time.process_time(),
        )
        for _ in range(repeats):
            call()
        self._synchronize()
        wall_seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_seconds
        if wall_clock_only:
            return wall_seconds / repeats
        # What its threads spent queueing for a core, others took; but it cannot have been faster than its own work shared evenly.
        return max(wall_seconds - (read_queued_seconds() - queued_before), cpu_seconds / self.threads) / repeats

    def _reduce_min(self, value: float) -> float:
        """The smallest of the ranks' values."""
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
            # A call may copy or reshape on the side: what it is named after is its main operator.
            op_call = max(recorder.trace.calls, key=lambda candidate: (candidate.flops, candidate.moved_bytes))
            if self.device == "cuda":
                self._measure_workspace(benchmark, op_call, dtype)
            seconds = self.time_call(benchmark, is_warm=True)
        except (
            RuntimeError,
            NotImplementedError,
            ValueError,
        ) as error:  # an operator or type that this build does not have
            self.report(kind="skipped", reason=str(error).splitlines()[0][:120])
            return
        dims = (op_call.moved_bytes,) if op_call.kind == "stream" else rate_dims(op_call.kind, op_call.dims)
        if op_call.kind == "stream" and self.device == "cuda":
            dims = op_call.dims or dims  # a CPU's cores take what comes, however it is laid out
        work = op_call.flops if op_call.kind != "stream" else op_call.moved_bytes
        self.report(kind="rate", operation=op_call.name, dtype=dtype or op_call.dtype, dims=dims, rate=work / seconds)

    def _measure_workspace(self, benchmark: BenchmarkCall, op_call: OpCall, dtype: str) -> None:
        """Bytes that a call takes and gives back besides what it returns, per byte that it moves."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated_before = torch.cuda.memory_allocated()
        benchmark()
        workspace_bytes = torch.cuda.max_memory_allocated() - allocated_before - op_call.allocated_bytes
        # Of a block that it has the allocator leaves up to a megabyte unused: that is no workspace.
        if workspace_bytes > max(0.02 * op_call.moved_bytes, 2**21):
            self.report(
                kind="rate",
                operation=f"workspace {op_call.name}",
                dtype=dtype or op_call.dtype,
                dims=[op_call.moved_bytes],
                rate=workspace_bytes / op_call.moved_bytes,
            )

    def _measure_memory(self) -> dict[str, float]:
        """What a process holds beyond what is alive in it."""
        if self.device == "cuda":
            # The allocator's own count is exact; the libraries take a workspace from it for good.
            torch.cuda.reset_peak_memory_stats()
            fixed_bytes, transient_bytes, peak_bytes = run_reference_step(self.device, 1024, 128)
            return {"grain": 0.0, "retained": 0.0, "workspace": max(peak_bytes - fixed_bytes - transient_bytes, 0.0)}
        block_bytes, resident_before = 16 * 2**20, _read_process_status("VmRSS")
        blocks = [torch.ones(block_bytes // 4) for _ in range(8)]
        grain = max((_read_process_status("VmRSS") - resident_before) / len(blocks) - block_bytes, 0.0)
        del blocks
        fixed_bytes, transient_bytes, peak_bytes = run_reference_step(self.device, 1024, 128)
        unreturned_bytes = max(
            peak_bytes - resident_before - allocated_bytes(fixed_bytes + transient_bytes, 10**9, grain), 0.0
        )
        return {"grain": grain, "retained": unreturned_bytes / transient_bytes, "workspace": 0.0}

    def _measure_overhead(self) -> float:
        """Seconds per operator of a model so small that nothing else counts."""
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
        """How many operators the host issues per second, and how many tensors it hands to an optimizer."""
        self._launch_timer.time_all()
        for quantity, seconds in self._launch_timer.compute_medians().items():
            self.report(kind="rate", operation=quantity, dtype="float32", dims=[1.0], rate=1 / seconds)
        parameters = [nn.Parameter(torch.ones(8, 8, device=self.device)) for _ in range(200)]
        for value in parameters:
            value.grad = torch.ones_like(value)
        for fused in (True, False):
            step = torch.optim.AdamW(parameters, lr=1e-9, fused=fused).step
            name = "host optimizer" + (":fused" if fused else "")
            self.report(
                kind="rate",
                operation=name,
                dtype="float32",
                dims=[1.0],
                rate=len(parameters) / self.time_call(step, synchronous=True),
            )

    def _measure_optimizers(self) -> None:
        """Elements per second of each optimizer that torch has a fused kernel for, fused and not."""
        shapes = [(4096, 4096)] * 4 if self.device == "cuda" else [(1024, 1024)] * 4
        for optimizer_class, options in (
            (torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {}), (torch.optim.SGD, {}),
        ):  # fmt: skip
            for fused in (True, False):
                parameters = [nn.Parameter(torch.ones(shape, device=self.device)) for shape in shapes]
                for value in parameters:
                    value.grad = torch.ones_like(value)
                elements = sum(value.numel() for value in parameters)
                name = optimizer_class.__name__ + (":fused" if fused else "")
                if optimizer_class is torch.optim.SGD and not options:
                    name = "plain-" + name
                try:
                    seconds = self.time_call(optimizer_class(parameters, lr=1e-9, fused=fused, **options).step)  # type: ignore[arg-type]
                except RuntimeError:  # Adagrad has no fused kernel on CUDA
                    continue
                self.report(kind="rate", operation=name, dtype="float32", dims=[elements], rate=elements / seconds)

    def _measure_links(self) -> None:
        backend = dist.get_backend()
        for message_bytes in _MESSAGE_BYTES:
            message = torch.ones(message_bytes // 4, device=self.device)
            shard = torch.ones(message_bytes // 4 // self.ranks, device=self.device)
            full_tensor = torch.ones(shard.numel() * self.ranks, device=self.device)
            calls: dict[str, Callable[[], object]] = {
                "all_reduce": partial(dist.all_reduce, message),
                "reduce_scatter": partial(_reduce_scatter, shard, full_tensor),
                "all_gather": partial(dist.all_gather_into_tensor, full_tensor, shard),
            }
            for name, call in calls.items():
                self.report(
                    kind="link",
                    operation=name,
                    backend=backend,
                    ranks=self.ranks,
                    bytes=message_bytes,
                    seconds=self.time_call(call, synchronous=True),
                )
        # Ranks on a CPU use all of its cores here: what copies a message then cannot compute.
        self.report(
            kind="overlap", operation="all_reduce", share=self._measure_overlap() if self.device == "cuda" else 0.0
        )

    def _measure_overlap(self) -> float:
        """Share of an all-reduce that passes while this rank computes."""
        message = torch.ones(2**22, device=self.device)
        matrix = torch.ones(1024, 1024, device=self.device)

        def compute() -> None:
            for _ in range(4):
                torch.mm(matrix, matrix)

        def compute_and_communicate() -> None:
            work = dist.all_reduce(message, async_op=True)
            compute()
            work.wait()

        compute_seconds, communication_seconds, combined_seconds = (
            self.time_call(call, synchronous=True)
            for call in (compute, partial(dist.all_reduce, message), compute_and_communicate)
        )
        return min(
            max(
                (compute_seconds + communication_seconds - combined_seconds)
                / min(compute_seconds, communication_seconds),
                0.0,
            ),
            1.0,
        )


def _reduce_scatter(shard: Tensor, full_tensor: Tensor) -> object:
    # torch 2.13 renames it and warns about the old name.
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(shard, full_tensor)


def run_reference_step(device: str, width: int, samples: int) -> tuple[float, float, float]:
    """Train a small network of our own; (bytes that stay from step to step, those that come and go, as many as are alive at the
    peak by the recorder, and bytes that the process has at its own peak)."""
    model = nn.Sequential(
        *[
            layer
            for _ in range(4)
            for layer in (nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width), nn.ReLU())
        ]
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.ones(samples, width, device=device)
    for _ in range(2):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    parameter_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    peak_bytes = _read_peak_bytes(device)
    with record_ops(model, samples) as recorder, torch.autograd.set_multithreading_enabled(False):
        for parameter in model.parameters():
            recorder.ignore_storage(parameter)
            parameter.register_post_accumulate_grad_hook(make_gradient_hook(recorder))
        recorder.track_storage(inputs)
        model(inputs).square().mean().backward()
    calls = recorder.trace.calls
    return (
        3 * parameter_bytes,
        max(*(op_call.alive_bytes + op_call.gradient_bytes for op_call in calls), parameter_bytes),
        peak_bytes,
    )


def _measure_page_fault_cost(threads: int) -> float:
    """Seconds per byte of memory that was freed and is taken again, beyond touching it: what the allocator gave back to the
    system in between is handed out anew, page by page. Nothing where it keeps what it has.

    By the processor's clock over all threads: a wall clock sees mostly noise here.
    """
    num_bytes, costs = 32 * 2**20, []
    for _ in range(6):
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        start_seconds = time.process_time()
        memory.fill_(1)
        first_touch = time.process_time() - start_seconds
        start_seconds = time.process_time()
        memory.fill_(2)
        costs.append(max(first_touch - (time.process_time() - start_seconds), 0.0) / num_bytes / threads)
        del memory
        time.sleep(0.03)  # allocators wait a little before they give memory back
        torch.empty(2**16)  # and do so when they are next asked for some
    return sorted(costs[1:])[2]


def read_queued_seconds(*, main_thread_only: bool = False) -> float:
    """Seconds that this process's threads (or its main one) were ready to run but had no core, so far; 0 where the kernel does not tell."""
    queued_nanoseconds = 0
    with contextlib.suppress(FileNotFoundError):
        for task in [str(os.getpid())] if main_thread_only else os.listdir("/proc/self/task"):
            # The thread may just have ended, or the kernel not count.
            with (
                contextlib.suppress(OSError, ValueError, IndexError),
                open(f"/proc/self/task/{task}/schedstat") as file,
            ):
                queued_nanoseconds += int(file.read().split()[1])
    return queued_nanoseconds / 1e9


def _read_process_status(name: str) -> float:
    with open("/proc/self/status") as file:
        return next(float(line.split()[1]) * 1024 for line in file if line.startswith(name))


def _read_peak_bytes(device: str) -> float:
    return _read_process_status("VmHWM") if device == "cpu" else float(torch.cuda.max_memory_allocated())


def _read_framework_bytes(device: str) -> float:
    """What the process holds without a model: on a GPU what the driver and libraries took beside the allocator."""
    if device == "cpu":
        return _read_process_status("VmRSS")
    free, total = torch.cuda.mem_get_info()
    return float(total - free - torch.cuda.memory_reserved())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    MeasureWorker(**json.loads(sys.argv[1])).run()
    # Not through Python's own end: threads of the process group that still run then would abort the process after all is told.
    sys.stdout.flush()
    os._exit(0)
