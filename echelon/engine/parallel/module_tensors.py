"""Replace a model's parameters and buffers by what this rank keeps of them: a shard, a placeholder, rank 0's values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.engine.parallel.placeholder_tensor import make_placeholder
from echelon.engine.parallel.shard_layout import TPShard
from echelon.engine.process_groups import WorldCommunicator
from echelon.nn.recurrent import refresh_flat_weights


def named_tensors(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer by name; without `remove_duplicate`, shared ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=remove_duplicate)
    yield from model.named_buffers(remove_duplicate=remove_duplicate)


@torch.no_grad()
def replace_tensors(model: nn.Module, replace: Callable[[str, Tensor], Tensor | None], prefix: str = "") -> None:
    """Put `replace(name, tensor)` in place of every parameter and buffer; None keeps it. Shared tensors stay shared."""
    replacements: dict[int, Tensor] = {}
    for path, module in model.named_modules(prefix=prefix):
        for registry in (module._parameters, module._buffers):
            for key, tensor in registry.items():
                if tensor is None:
                    continue
                if id(tensor) not in replacements:
                    replacement = replace(f"{path}.{key}" if path else key, tensor)
                    if replacement is None:
                        continue
                    replacements[id(tensor)] = replacement
                registry[key] = replacements[id(tensor)]
        refresh_flat_weights(module)


def as_registered(value: Tensor, original: Tensor) -> Tensor:
    """`value` as a parameter where `original` is one."""
    return nn.Parameter(value, original.requires_grad) if isinstance(original, nn.Parameter) else value


def materialize_module(
    model: nn.Module,
    path: str,
    ranks: WorldCommunicator,
    tp_shards: Mapping[str, TPShard],
    other_stage_names: Set[str] = frozenset(),
) -> None:
    """Load rank 0's values into the module at `path`, on the device: this rank's shard of those in `tp_shards`, placeholders for
    `other_stage_names`. Every rank must call it."""

    def materialize(name: str, tensor: Tensor) -> Tensor | None:
        tp_shard = tp_shards.get(name)
        if isinstance(tensor, DTensor) or (tp_shard is not None and tensor.shape == tp_shard.local_shape):
            return None  # sharded with an inner unit
        value = torch.empty_like(tensor, device=ranks.device) if tensor.is_meta else tensor.detach().to(ranks.device)
        value = value.contiguous()  # required by fully_shard
        dist.broadcast(torch.view_as_real(value) if value.is_complex() else value, 0)
        registered = as_registered(value if tp_shard is None else tp_shard.extract(value), tensor)
        return make_placeholder(registered) if name in other_stage_names else registered

    replace_tensors(model.get_submodule(path), materialize, prefix=path)


@torch.no_grad()
def move_model(model: nn.Module, device: torch.device) -> None:
    """Move all but placeholders to `device`. Parameters stay the same objects."""

    def move(_: str, tensor: Tensor) -> Tensor | None:
        if tensor.is_meta or not isinstance(tensor, nn.Parameter):
            return None if tensor.is_meta else tensor.to(device)
        tensor.data = tensor.data.to(device)
        return None

    replace_tensors(model, move)
