"""All that optimizers keep, by parameter name: what `state_dict()` returns, saved whole and restored under any plan.

    state    per parameter, in any nesting; its tensors are laid out as the parameter is, or whole
    shared   what `optimizer.state` holds under other keys than parameters
    extra    what an optimizer's own `state_dict` adds

Settings of parameter groups are in groups.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from echelon.checkpoint_files.checkpoint_reader import StoredCheckpoint
from echelon.checkpoint_files.tensor_storage import tensor_bytes
from echelon.engine.checkpoint.json_values import UnstorableValue, decode, encode, find_tensor_refs
from echelon.engine.checkpoint.param_group_state import decode_group_settings, map_parameter_names
from echelon.engine.parallel.shard_layout import full_tensor_shape
from echelon.engine.run_state import RunState
from echelon.errors import IncompatibleCheckpointError, JobError


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of an optimizer's state on this rank, and the parameter whose layout it has ("": none, it is whole)."""

    value: Tensor
    layout_parameter: str


@dataclass(frozen=True, slots=True)
class SplitState:
    """A state dict by what its parts belong to."""

    state: dict[int, Any]  #: by the parameter's place
    shared: dict[Any, Any]
    extra: dict[str, Any]


def split_state_dict(state: Mapping[str, Any], parameter_count: int) -> SplitState:
    """What an optimizer of `parameter_count` parameters returned from `state_dict()`."""
    stored_entries, groups = state.get("state"), state.get("param_groups")
    entries: dict[Any, Any] = stored_entries if isinstance(stored_entries, dict) else {}
    parameter_entries = {key: entry for key, entry in entries.items() if type(key) is int and key < parameter_count}
    shared_entries = {key: entry for key, entry in entries.items() if key not in parameter_entries}
    standard_keys = {"state"} if isinstance(stored_entries, dict) else set()
    standard_keys |= {"param_groups"} if isinstance(groups, list) else set()
    return SplitState(
        parameter_entries, shared_entries, {key: value for key, value in state.items() if key not in standard_keys}
    )


def parameter_names(run: RunState, optimizer: Optimizer) -> list[str]:
    """The names of its parameters in the order of its groups; "" for one that stands for none."""
    names_by_id = map_parameter_names(run)
    return [names_by_id.get(id(parameter), "") for group in optimizer.param_groups for parameter in group["params"]]


def collect(run: RunState) -> tuple[list[dict[str, Any]], dict[str, StateTensor]]:
    """The optimizers' state of all ranks for JSON, and the tensors in it that this rank holds. Every rank must call it; raises JobError for
    state that a checkpoint cannot hold."""
    tensors: dict[str, StateTensor] = {}
    with run.ranks.raise_on_all_ranks():
        local_states = [
            _collect_optimizer(run, index, optimizer, tensors) for index, optimizer in enumerate(run.optimizers)
        ]
    rank_states = run.ranks.all_gather_object((local_states, _digest_shared_tensors(run, tensors)))
    _require_same_on_stages(run, rank_states)
    return [_merge_ranks([states[index] for states, _ in rank_states]) for index in range(len(local_states))], tensors


def _collect_optimizer(
    run: RunState, index: int, optimizer: Optimizer, tensors: dict[str, StateTensor]
) -> dict[str, Any]:
    parameter_order = parameter_names(run, optimizer)
    parts = split_state_dict(read_state_dict(optimizer), len(parameter_order))
    server_names = run.backend.server_trained

    def make_store_tensor(layout_parameter: str | None) -> Any:
        def store_tensor(path: str, value: Tensor) -> list[str]:
            while path in tensors:
                path += "'"  # a key may hold a slash
            value = value.to_dense() if value.is_sparse else value  # a step on it computes the same
            layout_name = (
                _find_layout_parameter(run, index, optimizer, path, value)
                if layout_parameter is None
                else layout_parameter
            )
            # On whole tensors a rank steps what it owns, and the first of them what is shared.
            if index not in run.full_tensor_optimizers or layout_parameter is not None or run.world.is_main:
                tensors[path] = StateTensor(value, "" if index in run.full_tensor_optimizers else layout_name)
            return [path, layout_name, value.device.type]

        return store_tensor

    try:
        return {
            "state": {
                parameter_order[position]: encode(
                    entry, f"{index}/{parameter_order[position]}", make_store_tensor(parameter_order[position])
                )
                for position, entry in parts.state.items()
                if parameter_order[position] and parameter_order[position] not in server_names
            },
            "shared": encode(parts.shared, f"{index}:state", make_store_tensor(None)),
            "extra": encode(parts.extra, f"{index}:extra", make_store_tensor(None)),
        }
    except UnstorableValue as error:
        raise make_unstorable_error(optimizer, error) from error


def read_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """Its `state_dict()`, or why there is none."""
    try:
        state_dict = optimizer.state_dict()
    except Exception as error:
        raise JobError(
            f"optimizer= is {type(optimizer).__name__}, whose state_dict() fails ({type(error).__name__}: {error}): its state could not be "
            "saved; repair it, or use another optimizer"
        ) from error
    if not isinstance(state_dict, dict):
        raise JobError(f"optimizer= is {type(optimizer).__name__}, whose state_dict() is no dict; return one")
    return state_dict


def make_unstorable_error(optimizer: Optimizer, error: UnstorableValue) -> JobError:
    """The error for state that a checkpoint cannot hold."""
    path = error.path.partition("/")[2] or error.path
    return JobError(
        f"optimizer= is {type(optimizer).__name__}, which keeps {error.reason} in state_dict() ({path}): a checkpoint does not hold it, and a "
        "resumed run would go on without it; keep tensors, numbers, strings and containers of these, or return such from its state_dict()"
    )


def _find_layout_parameter(run: RunState, index: int, optimizer: Optimizer, path: str, value: Tensor) -> str:
    """The parameter that a tensor which belongs to none is laid out like; "": it is whole."""
    if index in run.full_tensor_optimizers:
        return ""
    names_by_id = map_parameter_names(run)
    parameters_by_name = {
        names_by_id[id(parameter)]: parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in names_by_id
    }
    if value.dim() and any(
        name in run.tp_shards and run.tp_shards[name].local_shape == value.shape for name in parameters_by_name
    ):
        raise UnstorableValue(
            path, "a tensor that may be whole or a piece of a parameter under tp; use tp=1, or keep it per parameter"
        )
    matching = [name for name, parameter in parameters_by_name.items() if _is_same_layout(parameter, value)]
    if not matching and isinstance(value, DTensor):
        raise UnstorableValue(path, "a sharded tensor of no parameter's shape")
    position = path.rpartition("/")[2]
    same_position = (
        list(parameters_by_name)[int(position)]
        if position.isdigit() and int(position) < len(parameters_by_name)
        else ""
    )  # of a list with one for each parameter
    return same_position if same_position in matching else next(iter(matching), "")


def _is_same_layout(parameter: Tensor, tensor: Tensor) -> bool:
    if (
        isinstance(parameter, DTensor) != isinstance(tensor, DTensor)
        or parameter.shape != tensor.shape
        or not tensor.dim()
    ):
        return False
    return not isinstance(parameter, DTensor) or parameter.placements == tensor.placements  # type: ignore[attr-defined]


def _digest_shared_tensors(run: RunState, tensors: Mapping[str, StateTensor]) -> dict[str, str]:
    """Of tensors that belong to no parameter, for stages to compare."""
    if run.axes["pp"].size == 1:
        return {}
    shared_tensors = {path: state_tensor.value for path, state_tensor in tensors.items() if ":" in path.split("/")[0]}
    return {
        path: hashlib.sha256(tensor_bytes(value.to_local() if isinstance(value, DTensor) else value)).hexdigest()
        for path, value in shared_tensors.items()
    }


def _require_same_on_stages(run: RunState, rank_states: Sequence[tuple[list[dict[str, Any]], dict[str, str]]]) -> None:
    if run.axes["pp"].size == 1:
        return
    for index, optimizer in enumerate(run.optimizers):
        if index in run.full_tensor_optimizers:
            continue  # one rank steps it, or each tensor by itself
        shared_states = [(states[index]["shared"], states[index]["extra"]) for states, _ in rank_states]
        digests = [
            {key: digest for key, digest in rank_state.items() if key.startswith(f"{index}:")}
            for _, rank_state in rank_states
        ]
        if any(rank_state != shared_states[0] for rank_state in shared_states) or any(
            rank_state != digests[0] for rank_state in digests
        ):
            raise JobError(
                f"optimizer= is {type(optimizer).__name__}, which keeps state besides that of its parameters, and pipeline stages keep "
                "different ones: a checkpoint could not be read under another plan; keep it per parameter (optimizer.state[parameter]), "
                "or use pp=1"
            )


def _merge_ranks(rank_states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks: a parameter's state from the first that has it."""
    return {
        "state": {name: entry for rank_state in reversed(rank_states) for name, entry in rank_state["state"].items()},
        "shared": rank_states[0]["shared"],
        "extra": rank_states[0]["extra"],
    }


# Back


class OptimizerLoader:
    """Restores optimizers from a checkpoint: `targets` are to be filled in between."""

    def __init__(self, run: RunState, checkpoint: StoredCheckpoint) -> None:
        self._run, self._encoded = run, checkpoint.manifest["optimizers"]
        self.targets: dict[str, StateTensor] = {}
        parameters = dict(run.model.named_parameters()) | run.loss_parameters
        for index, optimizer in enumerate(run.optimizers):
            encoded, local_names = self._encoded[index], self._local_names(index, optimizer)
            for name in encoded["state"]:
                if name not in parameters:
                    raise IncompatibleCheckpointError(
                        f"{checkpoint.folder}: optimizer state for {name}, which neither the model nor the loss has"
                    )
            local_entries = [entry for name, entry in encoded["state"].items() if name in local_names]
            for path, layout_parameter, device in find_tensor_refs(
                [*local_entries, encoded["shared"], encoded["extra"]]
            ):
                is_shared = ":" in path.split("/")[0]
                if (
                    is_shared
                    and layout_parameter
                    and index not in run.full_tensor_optimizers
                    and (run.axes["pp"].size > 1 or layout_parameter in run.tp_shards)
                ):
                    raise IncompatibleCheckpointError(
                        f"{checkpoint.folder}: {type(optimizer).__name__} kept tensors of its parameters' shapes outside of their state, of which a "
                        "stage or a piece cannot take up its part; go on under a plan with pp=1 and tp=1"
                    )
                entry = checkpoint.entries[f"optimizer/{path}"]
                self.targets[path] = self._allocate_target(
                    index, parameters.get(layout_parameter), layout_parameter, entry, device
                )

    def _local_names(self, index: int, optimizer: Optimizer) -> set[str]:
        """The parameters whose state this rank keeps."""
        run = self._run
        server_names = run.backend.server_trained
        local_names = set(parameter_names(run, optimizer)) - {""} - server_names
        return (
            local_names & run.full_tensor_optimizers[index].owned_names
            if index in run.full_tensor_optimizers
            else local_names
        )

    def _allocate_target(
        self, index: int, parameter: Tensor | None, layout_parameter: str, entry: Any, device: str
    ) -> StateTensor:
        run = self._run
        if (
            parameter is not None
            and index not in run.full_tensor_optimizers
            and entry.shape == full_tensor_shape(parameter, run.tp_shards.get(layout_parameter))
        ):
            return StateTensor(torch.empty_like(parameter, dtype=entry.dtype).detach(), layout_parameter)
        target_device = torch.device("cpu") if device == "cpu" or not entry.shape else run.device
        return StateTensor(torch.empty(entry.shape, dtype=entry.dtype, device=target_device), "")

    def apply(self) -> None:
        """Give each optimizer what was filled, through its own load_state_dict."""
        for index, optimizer in enumerate(self._run.optimizers):
            self._apply_to(index, optimizer)

    def _apply_to(self, index: int, optimizer: Optimizer) -> None:
        encoded, local_names = self._encoded[index], self._local_names(index, optimizer)
        parameter_order = parameter_names(self._run, optimizer)

        def load_tensor(ref: Any) -> Tensor:
            return self.targets[ref[0]].value

        entries = {
            position: decode(encoded["state"][name], load_tensor)
            for position, name in enumerate(parameter_order)
            if name in local_names and name in encoded["state"]
        }
        live = optimizer.state_dict()
        server_names = self._run.backend.server_trained
        # What a parameter server trains has its state there, and what stands for it here keeps its own.
        server_entries = {
            position: entry
            for position, entry in split_state_dict(live, len(parameter_order)).state.items()
            if parameter_order[position] in server_names
        }
        restore(
            optimizer,
            live,
            entries | server_entries,
            decode(encoded["shared"], load_tensor),
            decode(encoded["extra"], load_tensor),
            decode_group_settings(self._run, index, optimizer, encoded["groups"]),
        )


def restore(
    optimizer: Optimizer,
    live: dict[str, Any],
    entries: dict[int, Any],
    shared: dict[Any, Any],
    extra: dict[str, Any],
    settings: Sequence[Mapping[str, Any]],
) -> None:
    """Load state into an optimizer. `live`: its present state dict; `settings`: of each group what to change."""
    state = dict(live) | extra
    if isinstance(state.get("param_groups"), list) and "param_groups" not in extra:
        state["param_groups"] = [
            {**group, **new_settings} for group, new_settings in zip(state["param_groups"], settings, strict=True)
        ]
    if isinstance(state.get("state"), dict) and "state" not in extra:
        state["state"] = {**entries, **shared}
    optimizer.load_state_dict(state)
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return
    # torch casts state to its parameter's dtype, and makes other strings of strings (2.13).
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    for position, entry in entries.items():
        optimizer.state[parameters[position]] = _undo_cast(entry, optimizer.state[parameters[position]], "")


def _undo_cast(saved: Any, loaded: Any, key: Any) -> Any:
    """What was saved, on the device that torch chose; what an optimizer made a tensor of by itself stays one."""
    if isinstance(saved, Tensor) or isinstance(loaded, Tensor):
        if not (isinstance(saved, Tensor) and isinstance(loaded, Tensor)) or key == "step":
            return loaded
        return saved.to(loaded.device)
    if type(saved) is dict and isinstance(loaded, dict):
        extra = {name: item for name, item in loaded.items() if name not in saved}
        return {name: _undo_cast(item, loaded.get(name), name) for name, item in saved.items()} | extra
    if type(saved) in (list, tuple) and isinstance(loaded, list | tuple) and len(saved) == len(loaded):
        return type(saved)(_undo_cast(item, loaded_item, None) for item, loaded_item in zip(saved, loaded, strict=True))
    return saved


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in a nested state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_tensors(item)
