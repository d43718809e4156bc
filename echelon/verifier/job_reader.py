"""Read a job for one device: its model's values, its batches, its optimizers.

Deliberately independent of the engine: comparing the two could not find an error that both share.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.checkpoint_files.checkpoint_reader import MANIFEST_FILE, open_checkpoint, read_full_tensors
from echelon.errors import JobError
from echelon.job import Job, call_optimizer
from echelon.tree import to_device
from echelon.trials.lazy_modules import initialise_lazy


def initialize_values(model: nn.Module, job: Job) -> None:
    """Give `model` the values that training starts from: those that its factory left on the meta device, then the job's weights."""
    initialise_lazy(model, job)
    for module in model.modules():
        own_tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in own_tensors):
            module.to_empty(device="cpu", recurse=False)
            reset_parameters = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if reset_parameters is not None:
                reset_parameters()
    if job.weights is not None:
        # Not strict: a tied weight is stored once. Values that are missing by mistake differ from the plan's run.
        model.load_state_dict(_load_weights(Path(job.weights)), strict=False)


def _load_weights(path: Path) -> dict[str, Tensor]:
    if path.is_dir():
        return _load_checkpoint(path)
    if path.suffix == ".json":
        files = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        for file in files:
            if Path(file).name != file or file.endswith(".json"):
                raise JobError(f"{path}: shard name {file!r} leaves the folder; name files in the index's folder")
        return {name: value for file in files for name, value in _load_weights(path.parent / file).items()}
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    state_dict: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return state_dict


def _load_checkpoint(path: Path) -> dict[str, Tensor]:
    """The model's tensors of a checkpoint, or of a run's checkpoint with the most steps."""
    folders = [folder for folder in path.glob("checkpoints/step-*") if folder.name[5:].isdigit()]
    steps = {path: 0} | {folder: int(folder.name[5:]) for folder in folders}
    complete = [folder for folder in steps if (folder / MANIFEST_FILE).is_file()]
    if not complete:
        raise JobError(f"weights={path}: a folder without a checkpoint; give a run, a checkpoint or a file of weights")
    folder = max(complete, key=lambda folder: steps[folder])
    checkpoint = open_checkpoint(folder)
    tensors = read_full_tensors(checkpoint, "model/")
    tables = _load_server_tables(folder, checkpoint.manifest["parameters"])
    return {name.removeprefix("model/"): value for name, value in tensors.items()} | tables


def _load_server_tables(folder: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    if not (folder / "server" / "manifest.json").is_file():
        return {}
    from echelon.server.store.shard_checkpoint import read_manifest
    from echelon.server.store.table_export import iterate_complete_rows

    tables = {}
    for spec in read_manifest(folder / "server")["specs"]:
        if spec["what"] == "table":
            table = torch.empty(shapes[spec["name"]], dtype=torch.float64 if spec["dtype"] == "f8" else torch.float32)
            for ids, values in iterate_complete_rows(folder / "server", spec["name"], len(table), spec["dtype"]):
                table[torch.from_numpy(ids)] = torch.from_numpy(values)
            tables[spec["name"]] = table
    return tables


def cast_batch(batch: Any, device: torch.device, dtype: torch.dtype | None = torch.float64) -> Any:
    """`batch` on `device`, its floating tensors in `dtype` (None: as they are)."""
    return to_device(batch, device, lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else None))


def build_optimizers(job: Job, model: nn.Module) -> list[Optimizer]:
    """The job's optimizers for the parameters that are trained."""
    result = call_optimizer(job, [(name, value) for name, value in model.named_parameters() if value.requires_grad])
    return [result] if isinstance(result, Optimizer) else list(result)


def build_schedules(job: Job, optimizers: Sequence[Optimizer], steps: int) -> list[Any]:
    """A schedule for each optimizer, except those that evaluations step (ReduceLROnPlateau), which a proof does not run."""
    if job.lr_schedule is None:
        return []
    arguments = (steps,) if _count_required_arguments(job.lr_schedule) > 1 else ()
    schedules = [job.lr_schedule(optimizer, *arguments) for optimizer in optimizers]
    return [schedule for schedule in schedules if job.eval_data is None or not requires_metric(schedule)]


def requires_metric(schedule: Any) -> bool:
    return _count_required_arguments(schedule.step) > 0


def _count_required_arguments(function: Callable[..., Any]) -> int:
    parameters = inspect.signature(function).parameters.values()
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def optimizer_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Every tensor of the optimizers' states, as `optimizer index/parameter/state`."""
    names = {id(value): name for name, value in model.named_parameters()}
    return {
        f"{index}/{names[id(parameter)]}/{key}": value
        for index, optimizer in enumerate(optimizers)
        for parameter, state in optimizer.state.items()
        if id(parameter) in names and isinstance(state, dict)  # other keys belong to no parameter
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def loss_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The parameters that the optimizers have in addition to the model's, in order: those of the loss."""
    model_ids = {id(value) for value in model.parameters()}
    optimized = [value for optimizer in optimizers for group in optimizer.param_groups for value in group["params"]]
    extra = [value for value in optimized if id(value) not in model_ids]
    return {f"parameter {number} of the loss": value for number, value in enumerate(extra, 1)}


def optimizer_groups(
    model: nn.Module, optimizers: Sequence[Optimizer], substitutes: Iterable[tuple[str, Tensor]] = ()
) -> dict[str, str]:
    """Parameter -> its optimizer settings: parameters with equal settings make steps of similar size. `substitutes`: tensors that optimizers
    hold in place of the model's parameters."""
    names = {id(value): name for name, value in (*model.named_parameters(), *substitutes)}
    groups: dict[str, str] = {}
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups |= {names[id(value)]: f"{index} {settings}" for value in group["params"] if id(value) in names}
    return groups
