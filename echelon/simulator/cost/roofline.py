"""Costs by data sheets, with constants that were fitted to published runs.

A matrix product takes its FLOPs at a fitted fraction of the peak, plus its traffic to distant caches, in whole waves of tiles: small
products are slow, and so are those whose rows are not aligned to 16 bytes. Everything else takes the time of the bytes that it moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from echelon.errors import PlanError
from echelon.plan.cluster import Cluster, DataSheet
from echelon.plan.forecast import MemoryForecast
from echelon.plan.plan import Plan
from echelon.plan.profile import Amount, OptimizerProfile, Profile
from echelon.simulator.calibration import FittedConstants, constants_digest
from echelon.simulator.compute import PRECISION_BYTES
from echelon.simulator.cost.cost_model import Exchange, HostSeconds, HostWork, RankGroup
from echelon.simulator.cost.network import cluster_network, require_links
from echelon.simulator.model_summary import Collective, LocalOperator, OperatorSummary
from echelon.simulator.rank_memory import RankMemory

#: Bytes/s of samples from the host while the device computes: PCIe 3.0 x16, the slowest link of the catalogue.
_HOST_BYTES_PER_SECOND = 12e9

#: Rows and columns of the tiles that one multiprocessor computes at a time, largest first: libraries have kernels of all these sizes
#: and pick the fastest (the names are those of cuBLAS and CUTLASS).
_TILE_SHAPES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
#: Operand elements fetched per element of the result with the largest tiles.
_LARGEST_TILE_COST = 1 / 256 + 1 / 128
#: Alignment of operand and result lines that Tensor Cores need (cuBLAS: "Tensor Core usage").
_ALIGNMENT_BYTES = 16
#: Otherwise libraries use kernels of earlier matrix instructions, at a fraction of their peak, by the bytes of an element and the alignment
#: of lines: measured on an H200 (8192 x 4096 x 4096 with one side a little more or less: 790 TFLOP/s on 16 bytes, 260 to 282 on 4,
#: 95 to 153 on 2; TF32 340 to 380 and 114 to 136).
_MISALIGNED_FRACTIONS = {(2, 4): 0.45, (2, 2): 0.22, (4, 4): 0.42}
#: The contiguous dims (1 rows, 2 columns, 3 depth) of the operands and the result, by which operand is transposed.
_CONTIGUOUS_DIMS = {"nn": (3, 2), "nt": (3, 2), "tn": (1, 2), "tt": (1, 3, 2)}
#: Power grows with the clock and the square of the voltage, and the voltage with the clock: the clock falls with the cube root of power.
_CLOCK_PER_POWER_EXPONENT = 1 / 3
#: Time of fused attention relative to FlashAttention-2: version 1 from Dao 2023 (A100, about 1.9 x); cuDNN uses the newest instructions.
ATTENTION_KERNEL_FACTORS = {"flash1": 1.9, "flash2": 1.0, "cudnn": 1.0}


def operand_line_sizes(operand_layout: str, dims: tuple[float, float, float, float]) -> tuple[float, ...]:
    """The lengths of contiguous lines of a product's operands and result. `operand_layout`: which operands are transposed (`nt`)."""
    return tuple(dims[dim] for dim in _CONTIGUOUS_DIMS.get(operand_layout, _CONTIGUOUS_DIMS["nn"]))


def product_seconds(
    sheet: DataSheet,
    constants: FittedConstants,
    precision: str,
    dims: tuple[float, float, float, float],
    flops: float,
    moved: float,
    line_sizes: tuple[float, ...],
) -> float:
    """`dims`: number of products, rows, columns and depth of each; `line_sizes`: elements per contiguous line."""
    batch_size, rows, columns, _ = dims
    width = PRECISION_BYTES[precision]
    clock: float = sheet.power**_CLOCK_PER_POWER_EXPONENT
    peak = _peak_for_alignment(sheet, precision, line_sizes, is_batched=batch_size > 1) * clock
    refetch_seconds = constants.traffic * width / 2 / sheet.bandwidth
    units, output_size = sheet.units, batch_size * rows * columns
    seconds_per_flop = math.inf
    for tile_rows, tile_columns in _TILE_SHAPES:
        waves = math.ceil(batch_size * math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns) / units)
        # Small tiles fetch their operands more often.
        relative_traffic = (1 / tile_rows + 1 / tile_columns) / _LARGEST_TILE_COST
        seconds_per_flop = min(
            seconds_per_flop,
            waves
            * units
            * tile_rows
            * tile_columns
            / output_size
            * (constants.product / peak + relative_traffic * refetch_seconds),
        )
    return max(flops * seconds_per_flop, moved / (sheet.bandwidth * constants.stream))


def _peak_for_alignment(sheet: DataSheet, precision: str, line_sizes: tuple[float, ...], *, is_batched: bool) -> float:
    """Peak FLOP/s of products with lines of these sizes. `is_batched`: several in one call."""
    peak = sheet.peak_flops(precision)
    width = PRECISION_BYTES[precision]
    # Shards have integer sizes, and the largest one counts.
    sizes = [math.ceil(line) for line in line_sizes]
    if precision == "fp32" or not any(size * width % _ALIGNMENT_BYTES for size in sizes):
        return peak
    if width < 2:  # narrower operands must be aligned: others are computed in 2 bytes
        return _peak_for_alignment(sheet, "half", line_sizes, is_batched=is_batched)
    if is_batched:  # batched kernels have no such variants: 33 to 77 TFLOP/s on an H200, whose vector units peak at 67
        return min(sheet.vector, peak)
    alignment = min(math.gcd(round(size * width), 4) for size in sizes)
    # Vector units need no alignment.
    return max(peak * sheet.legacy * _MISALIGNED_FRACTIONS[round(width), alignment], min(sheet.vector, peak))


def attention_seconds(
    sheet: DataSheet, constants: FittedConstants, precision: str, kernel: str, scores: float, flops: float
) -> float:
    """A fused attention kernel. `scores`: number of attention scores; `flops`: those of its products."""
    clock: float = sheet.power**_CLOCK_PER_POWER_EXPONENT
    peak = sheet.peak_flops(precision) * clock * (1.0 if kernel == "cudnn" else sheet.legacy)
    products = flops * constants.flash / peak
    return ATTENTION_KERNEL_FACTORS[kernel] * (products + scores * constants.score / (sheet.units * clock))


class RooflineCosts:
    """Devices of one kind and their links by data sheet."""

    trusts_trace = False

    def __init__(self, cluster: Cluster, constants: FittedConstants, attention_kernel: str = "flash2") -> None:
        device = cluster.nodes[0].devices[0]
        if device.sheet is None:
            raise PlanError(f"{cluster.name}: {device.name} has no data sheet; give its rates in the cluster file")
        self._cluster, self._device, self._sheet = cluster, device, device.sheet
        self._constants, self._kernel = constants, attention_kernel
        self._network = cluster_network(cluster, constants)
        self._devices = sum(len(node.devices) for node in cluster.nodes)
        self.capacity = float(device.memory)
        self.compiled_fraction = constants.compiled
        self.computes_fp8 = "fp8" in device.sheet.peaks
        self.overlap = constants.overlap

    def require(self, plan: Plan) -> None:
        if self._device.kind == "cuda" and plan.ranks > self._devices:
            raise PlanError(f'"{plan}" needs {plan.ranks} devices, {self._cluster.name} has {self._devices}')
        require_links(self._cluster, plan.ranks)

    def simplify(self, operators: Iterable[OperatorSummary]) -> tuple[OperatorSummary, ...]:
        """Merge element-wise operators: their cost depends only on their total bytes and their number."""
        others, groups = [], dict[tuple[bool, ...], list[OperatorSummary]]()
        for operator in operators:
            if operator.kind == "stream":
                key = operator.in_attention_core, operator.tp_sharded, operator.is_expert
                groups.setdefault(key, []).append(operator)
            else:
                others.append(operator)
        for group in groups.values():
            count, moved = sum(operator.count for operator in group), Amount()
            for operator in group:
                moved += operator.moved * operator.count
            others.append(replace(group[0], count=count, moved=moved * (1 / count)))
        return tuple(others)

    def operator_seconds(self, operator: LocalOperator) -> float:
        launch = self._constants.launch
        if operator.kind == "stream":
            return self.stream_seconds(operator.name, operator.moved) + launch
        if operator.kind == "attention":
            # Forward computes 4 FLOPs per score and head element. Backward computes 10, and the scores twice: recomputed, and their gradients.
            scores = operator.flops / operator.dims[3] / (4 if operator.phase == "forward" else 5)
            return launch + attention_seconds(
                self._sheet, self._constants, operator.precision, self._kernel, scores, operator.flops
            )
        if operator.kind == "convolution":
            images, in_channels, out_channels, kernel_elements, output_elements, groups = operator.dims
            shape = (1.0, images * output_elements, out_channels, in_channels / groups * kernel_elements)
            # Channels are contiguous where matrix units are used.
            line_sizes: tuple[float, ...] = (in_channels / groups, out_channels)
        else:
            batch, rows, columns, inner = operator.dims
            shape = (batch, rows, columns, inner)
            line_sizes = operand_line_sizes(operator.name.partition(":")[2], shape)
        return launch + product_seconds(
            self._sheet, self._constants, operator.precision, shape, operator.flops, operator.moved, line_sizes
        )

    def stream_seconds(self, name: str, moved: float) -> float:
        return moved / (self._sheet.bandwidth * self._constants.stream)

    def fresh_memory_seconds(self, size: float) -> float:
        return 0.0

    def optimizer_seconds(self, optimizer: OptimizerProfile, elements: float, *, fused: bool, width: float) -> float:
        return self.stream_seconds(optimizer.name, width * elements)

    def message_seconds(self, collective: Collective, size: float, group: RankGroup) -> float:
        if collective == "all_to_all":
            return self._network.all_to_all_seconds(size, group)
        if collective == "all_reduce":
            return self._network.all_reduce_seconds(size, group)
        return self._network.gather_seconds(size, group)

    def exchange(self, collective: Collective, size: float, group: RankGroup, messages: Iterable[float]) -> Exchange:
        # As one stream: the previous message hides the latency of the next.
        seconds = self.message_seconds(collective, size, group)
        return Exchange(seconds, seconds)

    def send_seconds(self, size: float, stride: int, ranks: int, *, identical_ranks: int = 1) -> float:
        return self._network.send_seconds(size, stride, ranks, identical_ranks)

    def hidden_seconds(self, exchange: float, compute: float) -> float:
        return min(exchange, compute * self.overlap)

    def hook_seconds(self, calls: float) -> float:
        return 0.0

    def host_seconds(self, work: HostWork) -> HostSeconds:
        return HostSeconds(self._constants.micro * work.tensors, self._constants.step * work.tensors)

    def input_seconds(self, samples: float, input_bytes: float, compute: float) -> float:
        return max(samples * input_bytes / _HOST_BYTES_PER_SECOND - compute, 0.0)

    def straggler_fraction(self, ranks: int) -> float:
        nodes = -(-ranks // len(self._cluster.nodes[0].devices))
        return self._constants.straggling * math.log2(nodes)

    def memory_forecast(self, memory: RankMemory) -> MemoryForecast:
        return with_overheads(memory, self._constants)

    def notes(self, profile: Profile, plan: Plan) -> tuple[str, ...]:
        name = self._device.name
        note = f"priced by the data sheet of {name} and constants {constants_digest()}: nothing was measured there"
        return *self._cluster.notes, note


def with_overheads(memory: RankMemory, constants: FittedConstants) -> MemoryForecast:
    """Add allocator gaps, communicator buffers and the driver. Parameters and states are exact; a step's allocations have an error margin.

    Works on arrays too: fits use it for many runs at once.
    """
    temporary = memory.temporary + constants.slack * memory.fragmenting
    peak = memory.parameters + memory.gradients + memory.optimizer + memory.activations + temporary + memory.buckets
    error = constants.unsure * (memory.activations + memory.temporary) + constants.spread * memory.fragmenting
    return MemoryForecast(
        parameters=memory.parameters,
        gradients=memory.gradients,
        optimizer=memory.optimizer,
        activations=memory.activations,
        temporary=temporary,
        buckets=memory.buckets,
        framework=constants.context + constants.buffers * memory.axes,
        low=peak - error,
        high=peak + error,
    )


def reserved_bytes(memory: MemoryForecast, capacity: float, constants: FittedConstants) -> float:
    """What the allocator reports as reserved. It caches freed memory while there is room, so this never decides what fits.

    max(min(peak with cache, capacity), peak), written without comparisons so that it works on arrays.
    """
    cached, free = memory.peak * (1 + constants.cached), capacity - memory.framework
    reserved = (cached + free - abs(cached - free)) / 2
    return (reserved + memory.peak + abs(reserved - memory.peak)) / 2
