"""The model's part of a checkpoint: its tensors, and `get_extra_state()` of its modules.

One rank stores each module's extra state: the first that computes the module. It goes into the manifest, tensors in it into the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.checkpoint_files.checkpoint_reader import StoredCheckpoint
from echelon.engine.checkpoint.json_values import TensorRecorder, UnstorableValue, decode, encode, find_tensor_refs
from echelon.engine.parallel.module_tensors import named_tensors
from echelon.engine.run_state import RunState
from echelon.errors import IncompatibleCheckpointError, JobError

_EXTRA_STATE_SUFFIX = "_extra_state"


def split_model_state(run: RunState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The model's tensors, without those of other stages and of servers, and the extra state of its modules."""
    state_dict = run.model.state_dict()
    extra_state = {name: value for name, value in state_dict.items() if name.rpartition(".")[2] == _EXTRA_STATE_SUFFIX}
    skipped_names = extra_state.keys() | run.backend.table_names
    tensors = {name: value for name, value in state_dict.items() if name not in skipped_names}
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            problem = f"its state_dict() contains {name}, a {type(value).__name__}, which no checkpoint can restore"
            raise JobError(f"model=: {problem}; leave it out, or move it to get_extra_state() and set_extra_state()")
    return {name: value.detach() for name, value in tensors.items() if not value.is_meta}, extra_state


def find_derived_tensors(run: RunState, tensors: Mapping[str, Tensor]) -> list[str]:
    """Tensors that state-dict hooks of the model create: it must load them itself."""
    registered_names = {name for name, _ in named_tensors(run.model, remove_duplicate=False)}
    return [name for name in tensors if name not in registered_names]


def collect_extra_state(run: RunState, extra_state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The extra state of all stages as JSON, and the tensors in it that this rank must write. Every rank must call it."""
    recorder = TensorRecorder()
    stored_here = select_modules_to_store(run, extra_state)

    def store_tensor(path: str, value: Tensor) -> list[str]:
        if isinstance(value, DTensor):
            raise UnstorableValue(path, "a sharded tensor")
        return recorder(path, value)

    with run.ranks.raise_on_all_ranks():
        try:
            encoded = {n: encode(value, n, store_tensor) for n, value in extra_state.items() if n in stored_here}
        except UnstorableValue as error:
            problem = f"get_extra_state() returns {error.reason} ({error.path}), which a checkpoint cannot hold"
            raise JobError(f"model=: {problem}; return tensors, numbers, strings and containers of these") from error
    return {name: value for s in run.ranks.all_gather_object(encoded) for name, value in s.items()}, recorder.tensors


def select_modules_to_store(run: RunState, names: Iterable[str]) -> set[str]:
    """The modules (as "path.anything") whose state this rank stores: on the first replica, the first stage that computes each."""
    units = run.rank_model.pipeline.unit_paths if run.rank_model.pipeline is not None else [""]
    prefixes = tuple(f"{unit}." if unit else "" for unit in units)
    computed_here = {name for name in names if f"{name.rpartition('.')[0]}.".startswith(prefixes)}
    stages = run.axes["pp"].all_gather_object(computed_here)
    first_stage = {name: next((i for i, computed in enumerate(stages) if name in computed), 0) for name in names}
    return {n for n, stage in first_stage.items() if run.is_first_replica and stage == run.axes["pp"].rank}


class ExtraStateLoader:
    """Restores extra state: fill `targets`, then call `apply`."""

    def __init__(self, run: RunState, checkpoint: StoredCheckpoint) -> None:
        self._run, self._encoded = run, checkpoint.manifest["extra_state"]
        modules = {name for name, module in run.model.named_modules() if has_extra_state(module)}
        stored_modules = {name.rpartition(".")[0] for name in self._encoded}
        if modules != stored_modules:
            differing = min(modules ^ stored_modules)
            where = "now and none in it" if differing in modules else "in it and none now"
            problem = f"the module {differing or 'model'} has extra state {where}; bring get_extra_state() back"
            raise IncompatibleCheckpointError(f"{checkpoint.folder}: {problem}")
        self.targets: dict[str, Tensor] = {}
        for path, device_type in find_tensor_refs(list(self._encoded.values())):
            self.targets[path] = checkpoint.allocate(f"extra/{path}", device_type, run.device)

    def apply(self) -> None:
        """Pass each module its state."""
        for name, encoded in self._encoded.items():
            module = self._run.model.get_submodule(name.rpartition(".")[0])
            module.set_extra_state(decode(encoded, lambda ref: self.targets[ref[0]]))


def has_extra_state(module: nn.Module) -> bool:
    """Whether it overrides `get_extra_state`."""
    return type(module).get_extra_state is not nn.Module.get_extra_state
