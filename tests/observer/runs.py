"""The events and documents of a made-up training of 400 steps on two ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from echelon.events import Event
from echelon.plan.cluster import Cluster, CollectiveTiming, Device, Node, RateCurve, RatePoint
from echelon.plan.forecast import Forecast, MemoryForecast, TimeForecast
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan

BATCH, STEPS_PER_EPOCH = 256, 50
NOW = 1_790_000_000.0


def step(number: int, **data: Any) -> Event:
    """A step event whose figures follow from its number."""
    noise = random.Random(number)
    spent = 0.030 + 0.004 * noise.random() + (0.03 if number % 40 == 0 else 0)
    figures = {
        "epoch": (number - 1) // STEPS_PER_EPOCH,
        "loss": 2.3 * math.exp(-number / 120) + 0.05 + 0.1 * noise.random() * math.exp(-number / 300),
        "rate": 1e-3 * (1 + math.cos(math.pi * number / 400)) / 2,
        "norm": 0.5 + noise.random(),
        "samples": BATCH,
        "seconds": spent if number > 1 else 0.4,
        "waited": 0.0006,
        "skipped": False,
    }
    return Event(kind="step", step=number, time=NOW + number * 0.05, data=figures | data)


def start(*, total: int, resumed_from: int = 0, **data: Any) -> Event:
    """A start event."""
    figures = {
        "job": "digits", "plan": "dp=2 zero=1 micro=64 threads=1", "ranks": 2, "batch": BATCH, "steps": total, "steps_per_epoch": STEPS_PER_EPOCH,
        "epochs": total // STEPS_PER_EPOCH, "samples": BATCH * STEPS_PER_EPOCH, "parameters": 421_642, "resumed_from": resumed_from,
        "device": "cpu", "run": "runs/digits", "file": "examples/digits.py", "seed": 7,
    }  # fmt: skip
    return Event(kind="start", step=resumed_from, time=NOW + resumed_from * 0.05, data=figures | data)


def training(*, first: int = 1, last: int, total: int, end: str | None = "finished") -> Iterator[Event]:
    """The events of one part of a run, steps `first` to `last` of `total`."""
    yield start(total=total, resumed_from=first - 1)
    for number in range(first, last + 1):
        yield step(number)
        now = NOW + number * 0.05 + 0.01
        if number % STEPS_PER_EPOCH == 0:
            metrics = {"loss": 2 * math.exp(-number / 110) + 0.08, "accuracy": 1 - 0.9 * math.exp(-number / 90)}
            data = {"epoch": number // STEPS_PER_EPOCH - 1, "metrics": metrics, "samples": 360, "seconds": 0.12}
            yield Event(kind="evaluation", step=number, time=now, data=data)
            path = f"runs/digits/checkpoints/step-{number:08d}"
            yield Event(
                kind="checkpoint",
                step=number,
                time=now,
                data={"path": path, "seconds": 0.05, "bytes": 5_060_000, "best": number == total},
            )
    yield Event(kind="memory", step=last, time=NOW + last * 0.05 + 0.02, data={"peak": 151_000_000, "held": 5_060_000})
    if end is not None:
        yield Event(
            kind="end",
            step=last,
            time=NOW + last * 0.05 + 0.03,
            data={"reason": end, "seconds": last * 0.05, "message": ""},
        )


def forecast(*, batch: int = BATCH) -> Forecast:
    """A forecast of 31 ms a step on two ranks, 4 of them exchange."""
    time = TimeForecast(
        forward=0.009,
        backward=0.016,
        exchange=0.004,
        hidden=0.002,
        optimizer=0.0015,
        input=0.0002,
        overhead=0.0003,
        low=0.027,
        high=0.036,
    )
    memory = MemoryForecast(
        parameters=1.7e6, gradients=1.7e6, optimizer=1.7e6, activations=9.2e7, temporary=4.1e7, buckets=2.5e6, framework=2.1e8, low=1.3e8,
        high=1.5e8,
    )  # fmt: skip
    return Forecast(plan=plan(), batch=batch, time=time, memory=memory, capacity=8e9, peak_at="backward of conv2")


def plan() -> Plan:
    """Two data ranks, optimizer sharded."""
    return Plan(mesh=Mesh(dp=2), zero=1, micro=64, threads=1)


def cluster() -> Cluster:
    """One machine of two cores."""
    curve = RateCurve(operation="mm:nn", points=(RatePoint((512.0, 512.0, 512.0), 9.1e10),))
    link = CollectiveTiming(operation="all_reduce", backend="gloo", ranks=2, points=((1024.0, 6e-5), (2.5e7, 0.011)))
    cpu = Device(
        kind="cpu",
        name="Xeon Platinum 8481C",
        memory=8_000_000_000,
        cores=2,
        instructions=("avx2", "avx512f"),
        curves=(curve,),
    )
    node = Node(name="here", cores=2, memory=8_000_000_000, devices=(cpu,), links=(link,))
    return Cluster(name="here", nodes=(node,), versions={"torch": "2.13.0", "python": "3.11.7"})
