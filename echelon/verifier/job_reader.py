"""How one device reads a job: its model's values, its batches, its optimizers. Written apart from the engine on purpose: a
misreading that both shared could never be found by comparing them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.engine.checkpoint.checkpoint_reader import MANIFEST, open_stored, tensors
from echelon.errors import JobError
from echelon.job import Job, call_optimizer
from echelon.tree import to_device
from echelon.trials.lazy_modules import initialise_lazy


def fill(model: nn.Module, job: Job) -> None:
    """Give `model` the values a training starts from: what its factory left on the meta device, then the job's weights."""
    initialise_lazy(model, job)
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in own):
            module.to_empty(device="cpu", recurse=False)
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if reset is not None:
                reset()
    if job.weights is not None:
        # Not strict: a tied weight is stored once. Whatever is wrongly left out shows against the plan's run.
        model.load_state_dict(_weights(Path(job.weights)), strict=False)


def _weights(path: Path) -> dict[str, Tensor]:
    if path.is_dir():
        return _stored(path)
    if path.suffix == ".json":
        files = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        for file in files:
            if Path(file).name != file or file.endswith(".json"):
                raise JobError(f"{path}: shard name {file!r} leaves the folder; name files that lie beside the index")
        return {name: value for file in files for name, value in _weights(path.parent / file).items()}
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    loaded: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return loaded


def _stored(path: Path) -> dict[str, Tensor]:
    """The model's tensors of a checkpoint, or of the one with most steps of a run."""
    made = [path, *(each for each in path.glob("checkpoints/step-*") if each.name[5:].isdigit())]
    whole = [each for each in made if (each / MANIFEST).is_file()]
    if not whole:
        raise JobError(
            f"weights={path}: a folder without a checkpoint; give a run or a checkpoint, or a file of weights"
        )
    folder = max(whole, key=lambda each: 0 if each == path else int(each.name[5:]))
    stored = open_stored(folder)
    held = tensors(stored, "model/")
    return {name.removeprefix("model/"): value for name, value in held.items()} | _tables(
        folder, stored.manifest["parameters"]
    )


def _tables(folder: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Of a checkpoint with a parameter server: its tables, as tensors."""
    if not (folder / "server" / "manifest.json").is_file():
        return {}
    from echelon.server.store.shard_checkpoint import read_manifest
    from echelon.server.store.table_export import every_row

    found = {}
    for spec in read_manifest(folder / "server")["specs"]:
        if spec["what"] == "table":
            table = torch.empty(shapes[spec["name"]], dtype=torch.float64 if spec["dtype"] == "f8" else torch.float32)
            for ids, values in every_row(folder / "server", spec["name"], len(table), spec["dtype"]):
                table[torch.from_numpy(ids)] = torch.from_numpy(values)
            found[spec["name"]] = table
    return found


def cast(batch: Any, device: torch.device, dtype: torch.dtype | None = torch.float64) -> Any:
    """`batch` on `device`, its floating tensors in `dtype` (None: as they are)."""
    return to_device(
        batch, device, lambda value: value.to(device=device, dtype=dtype if value.is_floating_point() else None)
    )


def optimizers(job: Job, model: nn.Module) -> list[Optimizer]:
    """The job's optimizers over what trains."""
    made = call_optimizer(job, [(name, value) for name, value in model.named_parameters() if value.requires_grad])
    return [made] if isinstance(made, Optimizer) else list(made)


def schedules(job: Job, made: Sequence[Optimizer], steps: int) -> list[Any]:
    """A schedule for each optimizer, but those that evaluations step (ReduceLROnPlateau): a proof has none."""
    if job.schedule is None:
        return []
    required = [
        each for each in inspect.signature(job.schedule).parameters.values()
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    found = [job.schedule(each, steps) if len(required) > 1 else job.schedule(each) for each in made]
    return [schedule for schedule in found if job.evaluation is None or not wants_loss(schedule)]


def wants_loss(schedule: Any) -> bool:
    """Whether its `step` must be given a number."""
    return any(
        each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        for each in inspect.signature(schedule.step).parameters.values()
    )


def optimizer_state(model: nn.Module, made: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Every tensor of the optimizers' states, as `number of the optimizer/parameter/state`."""
    names = {id(value): name for name, value in model.named_parameters()}
    return {
        f"{index}/{names[id(parameter)]}/{key}": value
        for index, optimizer in enumerate(made)
        for parameter, state in optimizer.state.items()
        if id(parameter) in names and isinstance(state, dict)  # other keys hold what belongs to no parameter
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def loss_parameters(model: nn.Module, made: Sequence[Optimizer]) -> dict[str, Tensor]:
    """What the optimizers hold besides the model's parameters, in order: those of the loss."""
    models = {id(value) for value in model.parameters()}
    held = [value for optimizer in made for group in optimizer.param_groups for value in group["params"]]
    others = [value for value in held if id(value) not in models]
    return {f"parameter {number} of the loss": value for number, value in enumerate(others, 1)}


def groups(model: nn.Module, made: Sequence[Optimizer], standins: Iterable[tuple[str, Tensor]] = ()) -> dict[str, str]:
    """Parameter -> what its optimizer is set to for it: those that are set alike make steps of like size. `standins`: tensors that
    optimizers hold in place of the model's parameters."""
    names = {id(value): name for name, value in (*model.named_parameters(), *standins)}
    found: dict[str, str] = {}
    for index, optimizer in enumerate(made):
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            alike = f"{index} {settings}"
            found |= {names[id(value)]: alike for value in group["params"] if id(value) in names}
    return found
