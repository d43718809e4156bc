"""What the ranks of a run hold together: whole tensors on rank 0, under unsharded names, and the memory of each."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from echelon.engine.checkpoint.param_group_state import optimizer_entries
from echelon.engine.parallel.full_tensor_optimizer import FullTensorOptimizer
from echelon.engine.parallel.shard_layout import TPShard, full_tensor_shape, local_regions, to_local
from echelon.engine.run_state import RunState

#: A GPU keeps copies of tensors only if several times their size is free.
_FREE_MEMORY_FACTOR = 4
#: Where a stretch of a tensor lies in the whole, and its numbers.
_Region = tuple[tuple[slice, ...], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullState:
    """Everything whole, on the CPU, by unsharded name."""

    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, Tensor]


@torch.no_grad()
def gather_full_state(run: RunState) -> FullState | None:
    """The run's state on rank 0, None elsewhere. Every rank must call it."""
    parameters = dict(run.model.named_parameters())
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    state = FullState(
        parameters=gather_full_tensors(run, parameters),
        gradients=gather_full_tensors(run, gradients),
        buffers=gather_full_tensors(run, dict(run.model.named_buffers())),
        optimizer=gather_full_tensors(run, optimizer_tensors(run)),
    )
    return state if run.world.is_main else None


def gather_full_tensors(run: RunState, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The full tensors on rank 0, on its CPU or, alone with room on its GPU, there. Every rank must call it.

    Not DTensor.full_tensor(): it gives the whole to every rank, on the device, and over gloo it crashes with CUDA tensors.
    """
    values = {name: value.to_dense() if value.is_sparse else value for name, value in values.items()}
    copies_bytes = _FREE_MEMORY_FACTOR * sum(value.nbytes for value in values.values())
    if run.world.size == 1 and run.device.type == "cuda" and torch.cuda.mem_get_info(run.device)[0] > copies_bytes:
        return {name: value.detach().clone() for name, value in values.items() if not value.is_meta}
    local = {name: _local_regions(run, name, value) for name, value in values.items() if _is_sender(run, name, value)}
    full_tensors: dict[str, Tensor] = {}
    if run.world.is_main:
        for name, (shape, regions) in local.items():
            _write_regions(full_tensors, name, shape, regions)
    if run.ranks.size == 1:
        return full_tensors
    # Headers are pickled, numbers sent as they are: pickled tensors take several times as long.
    headers = [(name, shape, [(i, n.shape, n.dtype) for i, n in regions]) for name, (shape, regions) in local.items()]
    rank_headers = run.ranks.gather_object(headers) or []
    transfer_device = torch.device("cpu") if "cpu:" in dist.get_backend_config() else run.device
    if not run.world.is_main:
        for _, regions in local.values():
            for _, numbers in regions:
                if numbers.numel():
                    dist.send(numbers.to(transfer_device), 0)
    for rank, headers_of_rank in enumerate(rank_headers[1:], start=1):
        for name, shape, region_headers in headers_of_rank:
            received = [(index, _receive(rank, transfer_device, *header)) for index, *header in region_headers]
            _write_regions(full_tensors, name, shape, received)
    return full_tensors


def _receive(rank: int, transfer_device: torch.device, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    numbers = torch.empty(shape, dtype=dtype, device=transfer_device)
    if numbers.numel():
        dist.recv(numbers, rank)
    return numbers.cpu()


def _write_regions(full: dict[str, Tensor], name: str, shape: tuple[int, ...], regions: Sequence[_Region]) -> None:
    for index, numbers in regions:
        if tuple(numbers.shape) == shape:
            full[name] = numbers
        else:
            full[name] = full[name] if name in full else numbers.new_empty(shape)
            full[name][index] = numbers


def full_tensor_optimizer_of(run: RunState, name: str) -> FullTensorOptimizer | None:
    """What steps the optimizer that keeps a value (`0/blocks.1.up.weight/exp_avg`) on whole tensors: the tensor's owner has it whole."""
    index, _, parameter_path = name.partition("/")  # Keras has slashes in parameter names
    return run.full_tensor_optimizers.get(int(index)) if parameter_path and index.isdigit() else None


def tp_shard_of(run: RunState, name: str, value: Tensor) -> TPShard | None:
    """How tensor parallelism cuts `blocks.1.up.weight`, its gradient or its optimizer state (`0/blocks.1.up.weight/exp_avg`)."""
    if full_tensor_optimizer_of(run, name) is not None:
        return None
    tp_shard = run.tp_shards.get(name.split("/")[1] if "/" in name else name)
    return tp_shard if tp_shard is not None and value.shape == tp_shard.local_shape else None


def _is_sender(run: RunState, name: str, value: Tensor) -> bool:
    """Whether this rank sends a value: the first of the ranks that hold the same does."""
    if value.is_meta:
        return False  # another stage's
    full_tensor_optimizer = full_tensor_optimizer_of(run, name)
    if full_tensor_optimizer is not None:
        return full_tensor_optimizer.is_first_replica
    is_sharded = {"pp": True, "dp": isinstance(value, DTensor), "tp": tp_shard_of(run, name, value) is not None}
    return not any(group.rank for axis, group in run.axes.items() if not is_sharded.get(axis))


def _local_regions(run: RunState, name: str, value: Tensor) -> tuple[tuple[int, ...], list[_Region]]:
    """The whole's shape, and what this rank has of it, on the CPU."""
    tp_shard = tp_shard_of(run, name, value)
    shape = tuple(full_tensor_shape(value, tp_shard))
    if 0 in shape:
        return shape, [((), torch.empty(shape, dtype=value.dtype))]
    return shape, [(r.slices, r.values.to("cpu", copy=True).contiguous()) for r in local_regions(value, tp_shard)]


def optimizer_tensors(run: RunState) -> dict[str, Tensor]:
    """Tensors of the optimizers' state: `0/blocks.1.up.weight/exp_avg`."""
    return {
        f"{index}/{name}/{key}": value
        for index, optimizer in enumerate(run.optimizers)
        for name, entry in optimizer_entries(run, optimizer)
        for key, value in entry.items()
        if isinstance(value, Tensor) and name not in run.backend.server_trained
    }


def state_bytes(run: RunState) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on this rank."""

    def local_bytes(values: Iterable[Tensor]) -> int:
        return sum(value.nbytes for value in map(to_local, values) if not value.is_meta)

    parameters = list(run.model.parameters())
    owned_bytes = sum(optimizer.owned_bytes for optimizer in run.full_tensor_optimizers.values())
    return {
        "parameters": local_bytes(parameters),
        "gradients": local_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer": local_bytes(optimizer_tensors(run).values()) + owned_bytes,
    }


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has used: the allocator's on an accelerator, resident memory on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    bytes_per_unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_unit
