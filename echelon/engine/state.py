"""What a run holds, under unsharded names: for checkpoints (as it lies on the ranks) and for proofs (whole, on rank 0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from echelon.engine.run import Run


#: Entries of a parameter group that name live parameters.
_LIVE = ("params", "param_names")
#: How a group's step is computed, not what: the running plan's choice, since the plan that saved may have had other kernels.
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything whole, on the CPU, by unsharded name."""

    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, Tensor]


@torch.no_grad()
def gather(run: Run) -> State | None:
    """The run's state on rank 0, None elsewhere. Every rank must call it."""
    named = list(run.model.named_parameters())
    state = State(
        parameters={name: whole(value) for name, value in named},
        gradients={name: whole(value.grad) for name, value in named if value.grad is not None},
        buffers={name: whole(value) for name, value in run.model.named_buffers()},
        optimizer={name: whole(value) for name, value in optimizer_tensors(run).items()},
    )
    return state if run.world.main else None


def whole(value: Tensor) -> Tensor:
    """The full tensor on rank 0's CPU (elsewhere this rank's part). A collective where the tensor is sharded.

    Not DTensor.full_tensor(): it gives the whole to every rank, on the device, and over gloo it crashes with CUDA tensors.
    """
    if not isinstance(value, DTensor):
        return value.detach().to("cpu", copy=True)
    size = dist.get_world_size()  # the data axis is the whole world
    rows = -(-value.shape[0] // size)  # fully_shard cuts dim 0 as torch.chunk does: all parts but the last are full
    part = torch.zeros(rows, *value.shape[1:], dtype=value.dtype)
    local = value.to_local().detach().cpu()
    part[: local.shape[0]] = local
    parts = [torch.empty_like(part) for _ in range(size)] if dist.get_rank() == 0 else None
    dist.gather(part, parts)
    return local if parts is None else torch.cat(parts)[: value.shape[0]]


def names(model: nn.Module) -> dict[int, str]:
    """Parameter identity -> its first name."""
    return {id(value): name for name, value in reversed(list(model.named_parameters()))}


def optimizer_tensors(run: Run) -> dict[str, Tensor]:
    """Tensors of the optimizers' state: `0/blocks.1.up.weight/exp_avg`."""
    return {
        f"{index}/{name}/{key}": value
        for index, optimizer in enumerate(run.optimizers)
        for name, entry in _entries(run.model, optimizer)
        for key, value in entry.items()
        if isinstance(value, Tensor)
    }


def optimizer_plain(run: Run) -> list[dict[str, Any]]:
    """The rest of it, fit for JSON: hyper-parameters by group with the names they cover, and plain state."""
    known = names(run.model)
    return [
        {
            "groups": [
                {key: value for key, value in group.items() if is_plain(value) and key not in _LIVE}
                | {"names": [known[id(value)] for value in group["params"]]}
                for group in optimizer.param_groups
            ],
            "state": {
                name: {key: value for key, value in entry.items() if is_plain(value)}
                for name, entry in _entries(run.model, optimizer)
            },
        }
        for optimizer in run.optimizers
    ]


def set_optimizers(run: Run, saved: Mapping[str, Tensor], plain: list[dict[str, Any]]) -> None:
    """Put back what `optimizer_tensors` and `optimizer_plain` gave, through each optimizer's own load_state_dict."""
    known = names(run.model)
    for index, (optimizer, rest) in enumerate(zip(run.optimizers, plain, strict=True)):
        order = {
            known[id(value)]: i
            for i, value in enumerate(v for group in optimizer.param_groups for v in group["params"])
        }
        entries = {name: dict(values) for name, values in rest["state"].items()}
        for path, value in saved.items():
            which, name, key = path.split("/", 2)
            if int(which) == index:
                entries.setdefault(name, {})[key] = value
        state = optimizer.state_dict()
        for group, old in zip(state["param_groups"], rest["groups"], strict=True):
            kept = {key: value for key, value in old.items() if key not in ("names", *_IMPLEMENTATION)}
            group.update({key: _thawed(value, group.get(key)) for key, value in kept.items()})
        state["state"] = {order[name]: entry for name, entry in entries.items()}
        optimizer.load_state_dict(state)


def _entries(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, dict[str, Any]]]:
    known = names(model)
    return [(known[id(value)], entry) for value, entry in optimizer.state.items()]


def is_plain(value: Any) -> bool:
    """Whether JSON holds it as it is."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)


def _thawed(value: Any, example: Any) -> Any:
    """JSON has no tuples: AdamW's betas come back as what they were."""
    return tuple(value) if isinstance(example, tuple) else value


def held(run: Run) -> dict[str, int]:
    """Bytes that this rank keeps: parameters, gradients, optimizer."""
    parameters = list(run.model.parameters())
    return {
        "parameters": sum(map(_bytes, parameters)),
        "gradients": sum(_bytes(value.grad) for value in parameters if value.grad is not None),
        "optimizer": sum(map(_bytes, optimizer_tensors(run).values())),
    }


def _bytes(value: Tensor) -> int:
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.numel() * local.element_size()
