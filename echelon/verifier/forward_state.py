"""Save and restore what forward and backward may change in a model on this rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from echelon.engine.checkpoint.run_attributes import read_trainable, set_trainable, snapshot_model
from echelon.engine.parallel.shard_layout import to_local


class ForwardState:
    """Parameters, buffers, requires_grad flags and attributes of modules, as they are now. Tensors are copied to the CPU."""

    def __init__(self, model: nn.Module, *, parameters: bool = True) -> None:
        self._model = model
        self._attributes, self._trainable = snapshot_model(model), read_trainable(model)
        tensors = local_tensors(model) if parameters else local_buffers(model)
        self._tensors = {name: value.to("cpu", copy=True) for name, value in tensors.items()}

    def restore(self) -> None:
        """Put everything back; may be called again."""
        self._attributes.restore()
        assign_tensors(local_tensors(self._model), self._tensors)
        set_trainable(self._model, self._trainable)

    def changed_tensors(self) -> list[str]:
        """The names of parameters and buffers with other values now."""
        pairs = [(k, value, self._tensors.get(k)) for k, value in local_tensors(self._model).items()]
        return [k for k, value, old in pairs if old is not None and not torch.equal(value, old.to(value.device))]


def local_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What this rank holds of parameters and buffers."""
    parameters = {name: to_local(value.detach()) for name, value in model.named_parameters()}
    return {name: value for name, value in parameters.items() if not value.is_meta} | local_buffers(model)


def local_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.named_buffers() if not value.is_meta}


@torch.no_grad()
def assign_tensors(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Give tensors these values, by name and where shapes agree; equal ones stay untouched."""
    for name, value in tensors.items():
        saved = values.get(name)
        if saved is not None and saved.shape == value.shape and not torch.equal(value, saved.to(value)):
            value.copy_(saved)
