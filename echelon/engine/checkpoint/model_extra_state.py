"""What a model keeps besides parameters and buffers: `get_extra_state()` of its modules.

One rank speaks for each module: the first of those that compute it. Its state goes into the manifest, tensors in it into the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.checkpoint_files.checkpoint_reader import StoredCheckpoint
from echelon.engine.checkpoint.json_values import UnstorableValue, decode, encode, find_tensor_refs
from echelon.engine.run_state import RunState
from echelon.errors import IncompatibleCheckpointError, JobError

_EXTRA_STATE_SUFFIX = "_extra_state"


def split_model_state(run: RunState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The model's tensors but those that other stages or servers hold, and the extra state of its modules."""
    server_names = run.backend.table_names
    state_dict = run.model.state_dict()
    extra_state = {name: value for name, value in state_dict.items() if name.rpartition(".")[2] == _EXTRA_STATE_SUFFIX}
    tensors = {
        name: value for name, value in state_dict.items() if name not in extra_state and name not in server_names
    }
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise JobError(
                f"model=: its state_dict() holds {name}, a {type(value).__name__}, which a checkpoint could not give back; leave it out, or "
                "return it from get_extra_state() and take it in set_extra_state()"
            )
    return {name: value.detach() for name, value in tensors.items() if not value.is_meta}, extra_state


def find_derived_tensors(run: RunState, tensors: Mapping[str, Tensor]) -> list[str]:
    """Tensors that the model's hooks make while it is saved: it must take them back by itself."""
    registered_names = {name for name, _ in run.model.named_parameters(remove_duplicate=False)}
    registered_names |= {name for name, _ in run.model.named_buffers(remove_duplicate=False)}
    return [name for name in tensors if name not in registered_names]


def collect_extra_state(run: RunState, extra_state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The extra state of all stages for JSON, and the tensors in it that this rank is to write. Every rank must call it."""
    tensors: dict[str, Tensor] = {}
    stored_here = select_modules_to_store(run, extra_state)

    def store_tensor(path: str, value: Tensor) -> list[str]:
        if isinstance(value, DTensor):
            raise UnstorableValue(path, "a sharded tensor")
        while path in tensors:
            path += "'"
        tensors[path] = value
        return [path, value.device.type]

    with run.ranks.raise_on_all_ranks():
        try:
            encoded = {
                name: encode(value, name, store_tensor) for name, value in extra_state.items() if name in stored_here
            }
        except UnstorableValue as error:
            raise JobError(
                f"model=: get_extra_state() gives {error.reason} ({error.path}), which a checkpoint does not hold; return tensors, numbers, strings "
                "and containers of these"
            ) from error
    merged = {
        name: value for rank_states in run.ranks.all_gather_object(encoded) for name, value in rank_states.items()
    }
    return merged, tensors


def select_modules_to_store(run: RunState, names: Iterable[str]) -> set[str]:
    """Of which modules (as "path.anything") this rank stores the state: of replicas the first does, of stages the first that computes the module."""
    units = run.rank_model.pipeline.unit_paths if run.rank_model.pipeline is not None else [""]
    computed_here = {
        module_name
        for module_name in names
        if any(f"{module_name.rpartition('.')[0]}.".startswith(f"{unit}." if unit else "") for unit in units)
    }
    names_by_stage = run.axes["pp"].all_gather_object(computed_here)
    if run.axes["dp"].rank or run.axes["tp"].rank:
        return set()
    stage_by_name = {
        name: next((stage_index for stage_index, stage_names in enumerate(names_by_stage) if name in stage_names), 0)
        for name in names
    }
    return {name for name, stage in stage_by_name.items() if stage == run.axes["pp"].rank}


class ExtraStateLoader:
    """Restores extra state: `targets` are to be filled in between."""

    def __init__(self, run: RunState, checkpoint: StoredCheckpoint) -> None:
        self._run, self._encoded = run, checkpoint.manifest["extra_state"]
        self.targets: dict[str, Tensor] = {}
        modules = {name for name, value in run.model.named_modules() if has_extra_state(value)}
        stored_modules = {name.rpartition(".")[0] for name in self._encoded}
        if modules != stored_modules:
            differing = min(modules ^ stored_modules)
            difference_text = "here and not there" if differing in modules else "there and not here"
            raise IncompatibleCheckpointError(
                f"{checkpoint.folder}: the module {differing or 'model'} has extra state {difference_text}; put it back"
            )
        for path, device in find_tensor_refs(list(self._encoded.values())):
            entry = checkpoint.entries[f"extra/{path}"]
            target_device = torch.device("cpu") if device == "cpu" else run.device
            self.targets[path] = torch.empty(entry.shape, dtype=entry.dtype, device=target_device)

    def apply(self) -> None:
        """Give each module what was filled."""
        for name, encoded in self._encoded.items():
            module = self._run.model.get_submodule(name.rpartition(".")[0])
            module.set_extra_state(decode(encoded, lambda ref: self.targets[ref[0]]))


def has_extra_state(module: nn.Module) -> bool:
    """Whether it overrides `get_extra_state`."""
    return type(module).get_extra_state is not nn.Module.get_extra_state
