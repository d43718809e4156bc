"""What a run holds, under unsharded names: for checkpoints (as it lies on the ranks) and for proofs (whole, on rank 0)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from echelon.engine.checkpoint.param_group_state import entries
from echelon.engine.parallel.shard_layout import Piece, local, regions, whole_shape

if TYPE_CHECKING:
    from echelon.engine.parallel.whole_tensor_optimizer import WholeOptimizer
    from echelon.engine.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything whole, on the CPU, by unsharded name."""

    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, Tensor]


#: What a rank has of a tensor: the whole's shape, and (where it begins, numbers on the CPU) for each stretch.
_Held = tuple[tuple[int, ...], list[tuple[tuple[slice, ...], Tensor]]]


@torch.no_grad()
def gather(run: Run) -> State | None:
    """The run's state on rank 0, None elsewhere. Every rank must call it."""
    named = list(run.model.named_parameters())
    kinds: dict[str, Mapping[str, Tensor]] = {
        "parameters": dict(named),
        "gradients": {name: value.grad for name, value in named if value.grad is not None},
        "buffers": dict(run.model.named_buffers()),
        "optimizer": optimizer_tensors(run),
    }
    found = {kind: whole(run, values) for kind, values in kinds.items()}
    return State(**found) if run.world.main else None


def whole(run: Run, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The full tensors on rank 0, on its CPU or, where it is alone and its GPU has the room, there (elsewhere nothing). Every rank must
    call it.

    Not DTensor.full_tensor(): it gives the whole to every rank, on the device, and over gloo it crashes with CUDA tensors.
    """
    values = {name: value.to_dense() if value.is_sparse else value for name, value in values.items()}
    if run.world.size == 1 and _has_room(run.device, values):
        return {name: value.detach().clone() for name, value in values.items() if not value.is_meta}
    mine = {name: _held(run, name, value) for name, value in values.items() if _speaks(run, name, value)}
    full: dict[str, Tensor] = {}
    if run.world.main:
        _place(full, mine)
    if run.ranks.size > 1:
        # Only what is to come is pickled. The numbers go as they are: pickled tensors take several times as long.
        told = [] if run.world.main else [(name, shape, _heads(parts)) for name, (shape, parts) in mine.items()]
        everyone: list[Any] | None = [None] * run.ranks.size if run.world.main else None
        dist.gather_object(told, everyone)
        way = torch.device("cpu") if "cpu:" in dist.get_backend_config() else run.device
        if not run.world.main:
            for numbers in (each for _, parts in mine.values() for _, each in parts if each.numel()):
                dist.send(numbers.to(way), 0)
        for rank, theirs in enumerate(everyone or []):
            for name, shape, heads in theirs:
                _place(full, {name: (shape, [(place, _receive(rank, way, *head)) for place, *head in heads])})
    return full


#: A GPU keeps copies of tensors only if several times their size is free.
_SPARE = 4


def _has_room(device: torch.device, values: Mapping[str, Tensor]) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.mem_get_info(device)[0] > _SPARE * sum(value.nbytes for value in values.values())


def _heads(stretches: Sequence[tuple[tuple[slice, ...], Tensor]]) -> list[Any]:
    """What the receiver must know of the numbers before they come."""
    return [(place, numbers.shape, numbers.dtype) for place, numbers in stretches]


def _receive(rank: int, way: torch.device, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    numbers = torch.empty(shape, dtype=dtype, device=way)
    if numbers.numel():
        dist.recv(numbers, rank)
    return numbers.cpu()


def _place(full: dict[str, Tensor], parts: Mapping[str, _Held]) -> None:
    """Put numbers where they belong in the whole."""
    for name, (shape, stretches) in parts.items():
        for place, numbers in stretches:
            if tuple(numbers.shape) == shape:
                full[name] = numbers
                continue
            if name not in full:
                full[name] = numbers.new_empty(shape)
            full[name][place] = numbers


def whole_of(run: Run, name: str) -> WholeOptimizer | None:
    """What steps the optimizer that keeps a value (`0/blocks.1.up.weight/exp_avg`) on whole tensors: the tensor's owner has it whole."""
    number, _, rest = name.partition("/")  # Keras has strokes in parameter names
    return run.whole.get(int(number)) if rest and number.isdigit() else None


def piece_of(run: Run, name: str, value: Tensor) -> Piece | None:
    """How the tensor axis cuts a value: `blocks.1.up.weight`, its gradient, or what an optimizer keeps for it
    (`0/blocks.1.up.weight/exp_avg`); a step count is not cut."""
    if whole_of(run, name) is not None:
        return None
    piece = run.pieces.get(name.split("/")[1] if "/" in name else name)
    return piece if piece is not None and value.shape == piece.shape else None


def _speaks(run: Run, name: str, value: Tensor) -> bool:
    """Whether this rank tells of a value: of ranks that hold the same the first does."""
    if value.is_meta:
        return False  # another stage's
    whole = whole_of(run, name)
    if whole is not None:
        return whole.first
    cut = {"dp"} if isinstance(value, DTensor) else set()
    cut |= {"pp"} | ({"tp"} if piece_of(run, name, value) is not None else set())
    return not any(group.rank for axis, group in run.axes.items() if axis not in cut)


def _held(run: Run, name: str, value: Tensor) -> _Held:
    piece = piece_of(run, name, value)
    shape = tuple(whole_shape(value, piece))
    if 0 in shape:
        return shape, [((), torch.empty(shape, dtype=value.dtype))]
    stretches = [(each.place, each.values.to("cpu", copy=True).contiguous()) for each in regions(value, piece)]
    return shape, stretches


def optimizer_tensors(run: Run) -> dict[str, Tensor]:
    """Tensors of the optimizers' state: `0/blocks.1.up.weight/exp_avg`."""
    return {
        f"{index}/{name}/{key}": value
        for index, optimizer in enumerate(run.optimizers)
        for name, entry in entries(run, optimizer)
        for key, value in entry.items()
        if isinstance(value, Tensor) and (run.hub is None or name not in run.hub.trained)
    }


def held(run: Run) -> dict[str, int]:
    """Bytes that this rank keeps: parameters, gradients, optimizer."""
    parameters = list(run.model.parameters())
    return {
        "parameters": sum(map(_bytes, parameters)),
        "gradients": sum(_bytes(value.grad) for value in parameters if value.grad is not None),
        "optimizer": sum(map(_bytes, optimizer_tensors(run).values())) + sum(each.bytes for each in run.whole.values()),
    }


def _bytes(value: Tensor) -> int:
    here = local(value)
    return 0 if here.is_meta else here.numel() * here.element_size()
