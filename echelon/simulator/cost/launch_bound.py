"""The host of a GPU launches operators ahead of the device; where it is slower, the device waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from echelon.plan.cluster import Device
from echelon.simulator.cost.cost_model import HostWork

#: A segment of the step: seconds in which the host launches it, seconds in which the device executes it.
LaunchSegment = tuple[float, float]


def host_stall_seconds(segments: Iterable[LaunchSegment]) -> float:
    """Seconds that the device waits for its host: no operator starts before its launch, nor before the previous one has ended.

    The critical path follows the host up to some segment and the device from there on.
    """
    segments = list(segments)
    critical_path = device_seconds = sum(device for _, device in segments)
    launched, device_left = 0.0, device_seconds
    for host, device in segments:
        launched, device_left = launched + host, device_left - device
        critical_path = max(critical_path, launched + device_left)
    return critical_path - device_seconds


def launch_segments(work: HostWork, device: Device, ranks: int, sample_seconds: float) -> Iterator[LaunchSegment]:
    """A step as its host launches it. `sample_seconds`: host time to read one sample."""

    def host_seconds(operation: str) -> float:
        curve = device.nearest_curve(f"host {operation}", "float32", ranks=ranks)
        return 1 / curve.rate_at((1.0,)) if curve else device.overhead

    def seconds_per_call(operation: str) -> float:
        """Models of matmuls and of convolutions have different operators around them."""
        counts = {"matmul": work.matmul_calls, "convolution": work.convolution_calls}
        total = sum(counts.values())
        if not total:
            return device.overhead
        return sum(count * host_seconds(operation.format(kind)) for kind, count in counts.items() if count) / total

    forward = (work.forward_calls - work.block_calls) * seconds_per_call("forward {}")
    backward = work.backward_calls * seconds_per_call("backward {}")
    if work.block_calls:
        forward += work.block_calls * seconds_per_call(f"forward {{}} {work.recompute}")
        backward += work.block_calls * seconds_per_call(f"again {{}} {work.recompute}")
    accumulate = work.tensors * host_seconds("adding")
    for index, (samples, forward_seconds, backward_seconds) in enumerate(work.micro_batches):
        yield forward + samples * sample_seconds, forward_seconds
        adds = float(index > 0)
        yield backward + adds * accumulate, backward_seconds + adds * work.accumulate_seconds
    optimizer = "optimizer:fused" if work.fused_optimizer else "optimizer"
    yield work.tensors * host_seconds(optimizer), work.optimizer_seconds
