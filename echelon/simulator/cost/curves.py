"""Costs measured on this machine: rates of operators and timings of messages, under the load of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from echelon.errors import PlanError
from echelon.plan.cluster import Cluster, RateCurve, allocated_bytes
from echelon.plan.forecast import MemoryForecast
from echelon.plan.plan import Plan
from echelon.plan.profile import OptimizerProfile, Profile, rate_dims
from echelon.simulator.cost.cost_model import Exchange, HostSeconds, HostWork, RankGroup
from echelon.simulator.cost.launch_bound import host_stall_seconds, launch_segments
from echelon.simulator.model_summary import Collective, LocalOperator, OperatorSummary
from echelon.simulator.rank_memory import RankMemory

#: Bytes or FLOPs per second of an operator when neither it nor anything like it was measured: pessimistic.
_UNMEASURED_RATE = 1e9
#: Threads of a rank wait for each other: when another rank has the core of one, all of them wait (a judgement, not measured).
_OVERSUBSCRIPTION_PENALTY = 1.15
#: Relative error of peak memory: of replicated plans, of sharded ones, and of those in another precision than the profile's.
_REPLICATED_ERROR, _SHARDED_ERROR, _CONVERTED_ERROR = 0.08, 0.12, 0.5
#: Host work per FSDP unit and pass (hooks, streams, views), in operators: a judgement, not measured.
_HOOK_OPERATORS = 60
#: Host work to read and collate one sample, in operators.
_SAMPLE_OPERATORS = 1
#: Fraction of a CPU node's memory that ranks may use: the system and the launcher need some too.
_USABLE_MEMORY = 0.95


class CurveCosts:
    """A measured node on which `ranks` ranks of `threads` threads each compute."""

    trusts_trace = True
    compiled_fraction = 1.0
    computes_fp8 = False

    def __init__(self, cluster: Cluster, ranks: int, threads: int | None = None) -> None:
        require_uniform_node(cluster)
        self._cluster, self._node = cluster, cluster.nodes[0]
        self._device, self._ranks = self._node.devices[0], ranks
        self._is_cpu = cluster.device_kind == "cpu"
        self._threads = threads or max(self._node.cores // ranks, 1)
        #: The factor by which everything slows down because there are more threads than cores.
        self.oversubscription = 1.0
        if self._is_cpu and ranks * self._threads > self._node.cores:
            penalty = _OVERSUBSCRIPTION_PENALTY if self._threads > 1 else 1.0
            self.oversubscription = ranks * self._threads / self._node.cores * penalty
        self._curves: dict[tuple[str, str], RateCurve | None] = {}
        timing = self._node.nearest_timing("all_reduce", ranks)
        self.overlap = timing.overlap if timing is not None else 0.0

    @property
    def capacity(self) -> float:
        if self._is_cpu:
            return self._node.memory * _USABLE_MEMORY / self._ranks
        return float(min(device.memory for device in self._node.devices))

    def require(self, plan: Plan) -> None:
        if plan.precision == "fp8":
            raise PlanError("precision=fp8: it is forecast by data sheets only; use bf16, or give a cluster by name")
        for axis in ("cp", "ep"):
            if getattr(plan.mesh, axis) > 1:
                raise PlanError(f"{axis}={getattr(plan.mesh, axis)}: this axis is not measured; use {axis}=1")

    def simplify(self, operators: Iterable[OperatorSummary]) -> tuple[OperatorSummary, ...]:
        return tuple(operators)

    def operator_seconds(self, operator: LocalOperator) -> float:
        if operator.kind == "stream":
            moved = operator.moved
            return moved / self._rate((operator.name, "add"), operator.dtype, (moved,), operator.dims)
        names: tuple[str, ...] = (operator.name,)
        kind: str = operator.kind
        if operator.kind in ("weight_matmul", "activation_matmul"):
            base, _, layout = operator.name.partition(":")
            names, kind = (operator.name, f"{base}:nn", f"mm:{layout}", "mm:nn"), "matmul"
        is_tf32 = operator.precision == "tf32" and operator.dtype == "float32" and operator.kind != "attention"
        dtype = "tf32" if is_tf32 else operator.dtype
        return operator.flops / self._rate(names, dtype, rate_dims(kind, operator.dims))

    def stream_seconds(self, name: str, moved: float) -> float:
        return moved / self._rate((name, "add"), "float32", (moved,)) if moved else 0.0

    def fresh_memory_seconds(self, size: float) -> float:
        return self._device.page_fault_seconds * size * self.oversubscription

    def optimizer_seconds(self, optimizer: OptimizerProfile, elements: float, *, fused: bool, width: float) -> float:
        name = optimizer.name if optimizer.state_bytes or optimizer.name != "SGD" else "plain-SGD"
        suffix = ":fused" if fused else ""
        names = (name + suffix, "AdamW" + suffix, "AdamW")
        return elements / self._rate(names, "float32", (elements,)) if elements else 0.0

    def message_seconds(self, collective: Collective, size: float, group: RankGroup) -> float:
        if group.ranks < 2 or not size:
            return 0.0
        timing = self._node.nearest_timing(collective, group.ranks)
        if timing is None:  # through memory, twice
            return 2 * self.stream_seconds("copy_", 2 * size)
        # A ring moves (n - 1) / n of the data per rank: scale from the measured number of ranks.
        scale = ((group.ranks - 1) / group.ranks) / ((timing.ranks - 1) / timing.ranks)
        return timing.seconds(size) * max(scale, 1.0) * self.oversubscription

    def exchange(self, collective: Collective, size: float, group: RankGroup, messages: Iterable[float]) -> Exchange:
        if group.ranks < 2 or not size:
            return Exchange()
        seconds = [self.message_seconds(collective, message, group) for message in messages]
        # The last bucket holds the gradients of the first layers: no computation is left to hide it.
        exposed = seconds[-1] if collective == "all_reduce" else 0.0
        return Exchange(sum(seconds) + self.stream_seconds("copy_", 2 * size), sum(seconds) - exposed)

    def send_seconds(self, size: float, stride: int, ranks: int, *, identical_ranks: int = 1) -> float:
        # Sends are not measured; in an all-gather over two ranks, each sends the other half of it.
        return self.message_seconds("all_gather", 2 * size, RankGroup(2))

    def hidden_seconds(self, exchange: float, compute: float) -> float:
        return min(exchange * self.overlap, compute)

    def hook_seconds(self, calls: float) -> float:
        return _HOOK_OPERATORS * self._device.overhead * calls

    def host_seconds(self, work: HostWork) -> HostSeconds:
        if self._is_cpu:
            calls = work.forward_calls + work.backward_calls + work.recomputed_calls
            return HostSeconds(calls * self._device.overhead * self.oversubscription)
        # The host runs ahead of the device and costs time only where the device waits for it.
        sample_seconds = _SAMPLE_OPERATORS * self._device.overhead
        stall = host_stall_seconds(launch_segments(work, self._device, self._ranks, sample_seconds))
        return HostSeconds(stall / len(work.micro_batches))

    def input_seconds(self, samples: float, input_bytes: float, compute: float) -> float:
        if not self._is_cpu:
            return 0.0
        collate_seconds = _SAMPLE_OPERATORS * self._device.overhead * self.oversubscription
        return samples * (self.stream_seconds("copy_", 2 * input_bytes) + collate_seconds)

    def straggler_fraction(self, ranks: int) -> float:
        return 0.0

    def memory_forecast(self, memory: RankMemory) -> MemoryForecast:
        device = self._device

        def allocated(size: float, blocks: float) -> float:
            return allocated_bytes(size, blocks, device.block_padding)

        parameters = allocated(memory.parameters, memory.tensors)
        gradients = allocated(memory.gradients, memory.tensors)
        optimizer = allocated(memory.optimizer, memory.tensors * memory.optimizer / max(memory.parameters, 1.0))
        activations = allocated(memory.activations, memory.blocks)
        transient = allocated(memory.temporary + self._workspace_bytes(memory), memory.blocks)
        buckets = allocated(memory.buckets, memory.tensors)
        # Allocations that come and go leave gaps. Activations leave almost none unless several micro-batches are in flight.
        gaps = max(transient, memory.fragmenting) + buckets + gradients + memory.gathered + memory.released
        temporary = transient + device.retained * gaps + device.workspace
        peak = parameters + gradients + optimizer + activations + temporary + buckets
        error = _SHARDED_ERROR if memory.is_sharded else _REPLICATED_ERROR
        error = _CONVERTED_ERROR if memory.is_converted else error
        return MemoryForecast(
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            activations=activations,
            temporary=temporary,
            buckets=buckets,
            framework=device.framework,
            low=peak * (1 - error),
            high=peak * (1 + error),
        )

    def notes(self, profile: Profile, plan: Plan) -> tuple[str, ...]:
        notes = [*profile.notes, *self._cluster.notes]
        if plan.compile:
            notes.append("torch.compile is not forecast: the time is that of the uncompiled model, an upper bound")
        if self.oversubscription > 1:
            notes.append(
                f"{self._ranks} ranks x {self._threads} threads on {self._node.cores} cores: everything takes "
                f"{self.oversubscription:.1f} times as long"
            )
        if plan.precision not in (None, profile.precision):
            notes.append(f"profiled in {profile.precision}, planned in {plan.precision}: the memory is a rough guess")
        if profile.device != self._cluster.device_kind:
            notes.append(f"traced for {profile.device}, forecast for {self._cluster.device_kind}: operators may differ")
        return tuple(notes)

    def _rate(self, names: tuple[str, ...], dtype: str, *dims_options: tuple[float, ...]) -> float:
        """The rate of the first of `names` that was measured under this load, in the nearest dtype. `dims_options`: the dims that the curve may
        have been measured over."""
        for candidate in dict.fromkeys((dtype, *(("bfloat16",) if dtype == "float16" else ()), "float32")):
            for name in names:
                curve = self._nearest_curve(name, candidate)
                dims = next((each for each in dims_options if curve and len(curve.points[0].dims) == len(each)), None)
                if curve is not None and dims is not None:
                    # Measured with more threads than the plan has: scale the rate.
                    threads = min(self._threads / curve.threads, 1.0) if self._is_cpu else 1.0
                    return curve.rate_at(dims) * threads / self.oversubscription
        return _UNMEASURED_RATE

    def _nearest_curve(self, name: str, dtype: str) -> RateCurve | None:
        if (name, dtype) not in self._curves:
            load = {"ranks": self._ranks, "threads": self._threads}
            self._curves[name, dtype] = self._device.nearest_curve(name, dtype, **load)
        return self._curves[name, dtype]

    def _workspace_bytes(self, memory: RankMemory) -> float:
        """The workspace of the running operator's library."""
        name, moved = f"workspace {memory.operator}", memory.operator_bytes
        curve = self._device.nearest_curve(name, "float32") or self._device.nearest_curve(name, "bfloat16")
        return moved * curve.rate_at((moved,)) if curve is not None and moved else 0.0


def require_uniform_node(cluster: Cluster) -> None:
    """Raise PlanError for machines that the curves of one device cannot price: several nodes, or unequal devices."""
    if len(cluster.nodes) > 1:
        raise PlanError(
            f"{cluster.name}: a cluster of {len(cluster.nodes)} nodes cannot be forecast, because no link between nodes is "
            "measured; use a cluster of one node"
        )
    first, *others = (replace(device, memory=0) for device in cluster.nodes[0].devices)
    for index, device in enumerate(others, 1):
        if device != first:
            raise PlanError(
                f"{cluster.nodes[0].name}: device {index} ({device.name}) is not like device 0 ({first.name}), and a step "
                "over unequal devices cannot be forecast; leave one kind of them out (CUDA_VISIBLE_DEVICES)"
            )
