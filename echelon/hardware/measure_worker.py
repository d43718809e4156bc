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

from echelon.hardware.benchmark_ops import Trial, heavy, trials
from echelon.hardware.launch_overhead import Hosts
from echelon.plan.cluster import rounded
from echelon.plan.profile import rate_dims
from echelon.trials.op_recorder import Call, Recorder, counting, recording

#: Seconds that one trial is repeated for, at most; one repetition at least.
_PATIENCE = {"cpu": 0.025, "cuda": 0.01}
#: Seconds that one product of 4096 x 4096 takes on the fastest GPUs at least.
_FILLER = 1e-4
_MESSAGES = (2**12, 2**16, 2**20, 2**23, 2**25)


class Probe:
    """This process among those that measure together."""

    def __init__(self, *, rank: int, ranks: int, threads: int, store: str, device: str, seconds: float) -> None:
        self.rank, self.ranks, self.threads, self.device = rank, ranks, threads, device
        self._seconds = seconds
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
        reference_step(self.device, 8, 16)
        self.say(kind="framework", bytes=_framework(self.device))
        if self.ranks == 1:
            self.say(kind="memory", **self._memory())
        if self.device == "cpu":
            self.say(kind="fault", seconds_per_byte=_fault(self.threads))
        self.say(kind="overhead", seconds=self._overhead())
        if self.device == "cuda":
            self._hosts.look()
        end, last = time.process_time() + self._seconds * self.threads, time.monotonic() + 2.5 * self._seconds
        for trial in trials(self.device):
            # On a machine that is busy with other things the time runs out; rates are then read off neighbouring points.
            if self._least(min(end - time.process_time(), last - time.monotonic())) > 0:
                self._rate(trial)
        if self.device == "cuda":
            self._hosts.look()
            torch.set_float32_matmul_precision("high")
            for trial in heavy(self.device):
                self._rate(trial, dtype="tf32")
            torch.set_float32_matmul_precision("highest")
            self._host()
        self._optimizers()
        if self.ranks > 1:
            self._links()

    def say(self, **line: Any) -> None:
        """Report one figure (rank 0 speaks: the ranks do the same at the same time)."""
        if self.rank == 0:
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()

    def time(self, call: Callable[[], object], *, waits: bool = False, warm: bool = False) -> float:
        """Seconds of one call: the lower quartile of repetitions, since disturbances only ever add.

        `waits`: it is a message, or the host's own time counts; `warm`: it ran before.
        """
        if not warm:
            call()
        self._sync()
        if self.device == "cuda" and not waits:
            return self._on_gpu(call)
        if self.ranks > 1:
            dist.barrier()
        first = self._once(call, 1, waits)
        # The ranks repeat equally often: what they time may be a collective.
        repeats = int(self._least(max(min(int(_PATIENCE[self.device] / max(first, 1e-6)), 200), 1)))
        inner = max(repeats // 8, 1)  # short calls are timed in groups, so that the clock itself does not count
        found = [first, *(self._once(call, inner, waits) for _ in range(max(repeats // inner, 1)))]
        return sorted(found)[len(found) // 4]

    def _on_gpu(self, call: Callable[[], object]) -> float:
        """Seconds of one call on the GPU alone: it is kept busy meanwhile with other work, so that its host runs ahead and launches do not count."""
        factor = self._factor
        found: list[float] = []
        host, device = 1e-4, 1e-4
        for turn in range(4):
            times = max(min(int(_PATIENCE["cuda"] / 4 / max(device, 1e-6)), 20), 1) if turn else 1
            for _ in range(min(int(1.5 * host * times / _FILLER) + 1, 40)):
                torch.mm(factor, factor)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            clock = time.perf_counter()
            start.record()
            for _ in range(times):
                call()
            end.record()
            host = (time.perf_counter() - clock) / times
            torch.cuda.synchronize()
            device = start.elapsed_time(end) / 1e3 / times
            if turn:
                found.append(device)
            if device * times > 2 * _PATIENCE["cuda"] and found:
                break
        return max(sorted(found)[len(found) // 4], 1e-7)

    @cached_property
    def _hosts(self) -> Hosts:
        return Hosts()

    @cached_property
    def _factor(self) -> Tensor:
        return torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16).normal_()

    def _once(self, call: Callable[[], object], inner: int, waits: bool) -> float:
        plain = self.device == "cuda" or waits
        queue, start, busy = 0.0 if plain else queued(), time.perf_counter(), time.process_time()
        for _ in range(inner):
            call()
        self._sync()
        wall, busy = time.perf_counter() - start, time.process_time() - busy
        if plain:
            return wall / inner
        # What its threads spent queueing for a core, others took; but it cannot have been faster than its own work shared evenly.
        return max(wall - (queued() - queue), busy / self.threads) / inner

    def _least(self, value: float) -> float:
        """The smallest of the ranks' values."""
        if self.ranks == 1:
            return value
        vote = torch.tensor(float(value), device=self.device)
        dist.all_reduce(vote, dist.ReduceOp.MIN)
        return vote.item()

    def _sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _rate(self, trial: Trial, dtype: str = "") -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False), Recorder(1) as recorder:
                trial()
            # A call may copy or reshape on the side: what it is named after is its main operator.
            call = max(recorder.trace.calls, key=lambda c: (c.flops, c.moved))
            if self.device == "cuda":
                self._workspace(trial, call, dtype)
            seconds = self.time(trial, warm=True)
        except (
            RuntimeError,
            NotImplementedError,
            ValueError,
        ) as error:  # an operator or type that this build does not have
            self.say(kind="skipped", reason=str(error).splitlines()[0][:120])
            return
        dims = (call.moved,) if call.kind == "stream" else rate_dims(call.kind, call.dims)
        if call.kind == "stream" and self.device == "cuda":
            dims = call.dims or dims  # a CPU's cores take what comes, however it is laid out
        work = call.flops if call.kind != "stream" else call.moved
        self.say(kind="rate", operation=call.name, dtype=dtype or call.dtype, dims=dims, rate=work / seconds)

    def _workspace(self, trial: Trial, call: Call, dtype: str) -> None:
        """Bytes that a call takes and gives back besides what it returns, per byte that it moves."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trial()
        extra = torch.cuda.max_memory_allocated() - before - call.made
        # Of a block that it has the allocator leaves up to a megabyte unused: that is no workspace.
        if extra > max(0.02 * call.moved, 2**21):
            self.say(
                kind="rate",
                operation=f"workspace {call.name}",
                dtype=dtype or call.dtype,
                dims=[call.moved],
                rate=extra / call.moved,
            )

    def _memory(self) -> dict[str, float]:
        """What a process holds beyond what is alive in it."""
        if self.device == "cuda":
            # The allocator's own count is exact; the libraries take a workspace from it for good.
            torch.cuda.reset_peak_memory_stats()
            fixed, moving, peak = reference_step(self.device, 1024, 128)
            return {"grain": 0.0, "retained": 0.0, "workspace": max(peak - fixed - moving, 0.0)}
        size, start = 16 * 2**20, _status("VmRSS")
        blocks = [torch.ones(size // 4) for _ in range(8)]
        grain = max((_status("VmRSS") - start) / len(blocks) - size, 0.0)
        del blocks
        fixed, moving, peak = reference_step(self.device, 1024, 128)
        unreturned = max(peak - start - rounded(fixed + moving, 10**9, grain), 0.0)
        return {"grain": grain, "retained": unreturned / moving, "workspace": 0.0}

    def _overhead(self) -> float:
        """Seconds per operator of a model so small that nothing else counts."""
        layers = nn.Sequential(*[part for _ in range(24) for part in (nn.Linear(4, 4), nn.ReLU())]).to(self.device)
        x = torch.ones(1, 4, device=self.device)

        def step() -> None:
            layers(x).sum().backward()
            layers.zero_grad()

        step()
        with torch.autograd.set_multithreading_enabled(False), Recorder(1) as recorder:
            step()
        return self.time(step, waits=self.device == "cuda") / len(recorder.trace.calls)

    def _host(self) -> None:
        """How many operators the host issues per second, and how many tensors it hands to an optimizer."""
        self._hosts.look()
        for what, seconds in self._hosts.seconds().items():
            self.say(kind="rate", operation=what, dtype="float32", dims=[1.0], rate=1 / seconds)
        held = [nn.Parameter(torch.ones(8, 8, device=self.device)) for _ in range(200)]
        for value in held:
            value.grad = torch.ones_like(value)
        for fused in (True, False):
            step = torch.optim.AdamW(held, lr=1e-9, fused=fused).step
            name = "host optimizer" + (":fused" if fused else "")
            self.say(
                kind="rate", operation=name, dtype="float32", dims=[1.0], rate=len(held) / self.time(step, waits=True)
            )

    def _optimizers(self) -> None:
        """Elements per second of each optimizer that torch has a fused kernel for, fused and not."""
        shapes = [(4096, 4096)] * 4 if self.device == "cuda" else [(1024, 1024)] * 4
        for kind, options in (
            (torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {}), (torch.optim.SGD, {}),
        ):  # fmt: skip
            for fused in (True, False):
                held = [nn.Parameter(torch.ones(shape, device=self.device)) for shape in shapes]
                for value in held:
                    value.grad = torch.ones_like(value)
                elements = sum(value.numel() for value in held)
                name = kind.__name__ + (":fused" if fused else "")
                if kind is torch.optim.SGD and not options:
                    name = "plain-" + name
                try:
                    seconds = self.time(kind(held, lr=1e-9, fused=fused, **options).step)  # type: ignore[arg-type]
                except RuntimeError:  # Adagrad has no fused kernel on CUDA
                    continue
                self.say(kind="rate", operation=name, dtype="float32", dims=[elements], rate=elements / seconds)

    def _links(self) -> None:
        backend = dist.get_backend()
        for size in _MESSAGES:
            full = torch.ones(size // 4, device=self.device)
            part = torch.ones(size // 4 // self.ranks, device=self.device)
            whole = torch.ones(part.numel() * self.ranks, device=self.device)
            calls: dict[str, Callable[[], object]] = {
                "all_reduce": partial(dist.all_reduce, full),
                "reduce_scatter": partial(_reduce_scatter, part, whole),
                "all_gather": partial(dist.all_gather_into_tensor, whole, part),
            }
            for name, call in calls.items():
                self.say(
                    kind="link",
                    operation=name,
                    backend=backend,
                    ranks=self.ranks,
                    bytes=size,
                    seconds=self.time(call, waits=True),
                )
        # Ranks on a CPU use all of its cores here: what copies a message then cannot compute.
        self.say(kind="overlap", operation="all_reduce", share=self._overlap() if self.device == "cuda" else 0.0)

    def _overlap(self) -> float:
        """Share of an all-reduce that passes while this rank computes."""
        message = torch.ones(2**22, device=self.device)
        a = torch.ones(1024, 1024, device=self.device)

        def compute() -> None:
            for _ in range(4):
                torch.mm(a, a)

        def both() -> None:
            work = dist.all_reduce(message, async_op=True)
            compute()
            work.wait()

        alone, talk, together = (
            self.time(call, waits=True) for call in (compute, partial(dist.all_reduce, message), both)
        )
        return min(max((alone + talk - together) / min(alone, talk), 0.0), 1.0)


def _reduce_scatter(part: Tensor, whole: Tensor) -> object:
    # torch 2.13 renames it and warns about the old name.
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(part, whole)


def reference_step(device: str, width: int, samples: int) -> tuple[float, float, float]:
    """Train a small network of our own; (bytes that stay from step to step, those that come and go, as many as are alive at the
    peak by the recorder, and bytes that the process has at its own peak)."""
    model = nn.Sequential(
        *[
            part
            for _ in range(4)
            for part in (nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width), nn.ReLU())
        ]
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.ones(samples, width, device=device)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    grown = _peak(device)
    with recording(model, samples) as recorder, torch.autograd.set_multithreading_enabled(False):
        for parameter in model.parameters():
            recorder.ignore(parameter)
            parameter.register_post_accumulate_grad_hook(counting(recorder))
        recorder.hold(x)
        model(x).square().mean().backward()
    calls = recorder.trace.calls
    return 3 * size, max(*(call.alive + call.gradients for call in calls), size), grown


def _fault(threads: int) -> float:
    """Seconds per byte of memory that was freed and is taken again, beyond touching it: what the allocator gave back to the
    system in between is handed out anew, page by page. Nothing where it keeps what it has.

    By the processor's clock over all threads: a wall clock sees mostly noise here.
    """
    size, found = 32 * 2**20, []
    for _ in range(6):
        memory = torch.empty(size, dtype=torch.uint8)
        start = time.process_time()
        memory.fill_(1)
        first = time.process_time() - start
        start = time.process_time()
        memory.fill_(2)
        found.append(max(first - (time.process_time() - start), 0.0) / size / threads)
        del memory
        time.sleep(0.03)  # allocators wait a little before they give memory back
        torch.empty(2**16)  # and do so when they are next asked for some
    return sorted(found[1:])[2]


def queued(*, main: bool = False) -> float:
    """Seconds that this process's threads (or its main one) were ready to run but had no core, so far; 0 where the kernel does not tell."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for task in [str(os.getpid())] if main else os.listdir("/proc/self/task"):
            # The thread may just have ended, or the kernel not count.
            with (
                contextlib.suppress(OSError, ValueError, IndexError),
                open(f"/proc/self/task/{task}/schedstat") as file,
            ):
                total += int(file.read().split()[1])
    return total / 1e9


def _status(name: str) -> float:
    with open("/proc/self/status") as file:
        return next(float(line.split()[1]) * 1024 for line in file if line.startswith(name))


def _peak(device: str) -> float:
    return _status("VmHWM") if device == "cpu" else float(torch.cuda.max_memory_allocated())


def _framework(device: str) -> float:
    """What the process holds without a model: on a GPU what the driver and libraries took beside the allocator."""
    if device == "cpu":
        return _status("VmRSS")
    free, total = torch.cuda.mem_get_info()
    return float(total - free - torch.cuda.memory_reserved())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    Probe(**json.loads(sys.argv[1])).run()
    # Not through Python's own end: threads of the process group that still run then would abort the process after all is told.
    sys.stdout.flush()
    os._exit(0)
