"""Refuse a checkpoint that this job cannot continue from: another model, optimizer, schedule, data set, or another trainer of a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.checkpoint_files.checkpoint_reader import StoredCheckpoint
from echelon.engine.checkpoint.param_group_state import OptimizerGroups, require_matching_groups
from echelon.engine.run_state import RunState
from echelon.errors import IncompatibleCheckpointError

_REMEDY = "restore it, or start a new run in another folder with weights= from this one"


def require_compatible(run: RunState, manifest: Mapping[str, Any], groups: OptimizerGroups, folder: Path) -> None:
    """Refuse a checkpoint with this manifest. `groups`: `gather_optimizer_groups` of the run."""
    _require_same_model(run, manifest, folder)
    _require_same_servers(run, manifest, folder)
    require_matching_groups(run, [optimizer["groups"] for optimizer in manifest["optimizers"]], groups, folder)
    if len(manifest["schedules"]) != len(run.schedules) and not run.replaces_schedules:
        counts = f"made with {len(manifest['schedules'])} schedules, the job now has {len(run.schedules)}"
        raise IncompatibleCheckpointError(f"{folder}: {counts} (lr_schedule= returns one per optimizer); {_REMEDY}")
    _require_same_data(run, manifest, folder)


def _require_same_model(run: RunState, manifest: Mapping[str, Any], folder: Path) -> None:
    if manifest["model"] == run.fingerprint:
        return
    current, stored = run.full_shapes, manifest["parameters"]
    name = next((name for name in (*current, *stored) if current.get(name) != stored.get(name)), "a dtype")
    difference = f"{name} is {stored.get(name, 'absent')} there and {current.get(name, 'absent')} here"
    raise IncompatibleCheckpointError(f"{folder}: made by another model: {difference}; start a new run (--fresh)")


def _require_same_servers(run: RunState, manifest: Mapping[str, Any], folder: Path) -> None:
    """What servers train keeps its state in server files, which ranks do not read, and the other way round."""
    stored_names = (manifest.get("served") or {}).get("trained", [])
    moved = sorted(run.backend.server_trained ^ set(stored_names))
    if not moved:
        return
    trainers = ["a parameter server", "the ranks"]
    before, now = trainers if moved[0] in stored_names else reversed(trainers)
    problem = f"{moved[0]} was trained by {before} there, and by {now} under this plan: its optimizer state cannot move"
    remedy = "resume with the same exchange=, dense= and rows=, or start a new run with weights= from this one"
    raise IncompatibleCheckpointError(f"{folder}: {problem}; {remedy}")


def _require_same_data(run: RunState, manifest: Mapping[str, Any], folder: Path) -> None:
    """A step is a position in one order of one data set: in another order, samples would be repeated and skipped."""
    for name, current in (("batch", run.job.batch_size), ("seed", run.job.seed), ("samples", run.sample_count)):
        if manifest[name] != current:
            problem = f"made with {name}={manifest[name]}, the job now has {current}: the order of samples would differ"
            raise IncompatibleCheckpointError(f"{folder}: {problem}; {_REMEDY}")
    order, content = manifest["order"], manifest["content"]
    if order != run.sample_order:
        causes = "files, lanes=, window= and bucket= of packed data; for very large sets echelon's version"
        problem = f"its samples were {order}, the job's are {run.sample_order}: the order would differ (it depends on {causes})"
        raise IncompatibleCheckpointError(f"{folder}: {problem}; {_REMEDY}")
    if content != run.data_fingerprint:
        contents = f"content {content or 'unknown'}, the job's has {run.data_fingerprint or 'none'}"
        raise IncompatibleCheckpointError(f"{folder}: made with packed data of {contents}; {_REMEDY}")


def unfreeze_stored(run: RunState, manifest: Mapping[str, Any], groups: OptimizerGroups, folder: Path) -> None:
    """Make the run's optimizers, with these groups, train what was unfrozen before the checkpoint was saved."""
    current = {name for optimizer_groups in groups for group in optimizer_groups for name in group["names"]}
    stored_groups = (group for optimizer in manifest["optimizers"] for group in optimizer["groups"])
    unfrozen = [name for group in stored_groups for name in group["names"] if name not in current]
    if not run.unfreeze(unfrozen):
        problem = f"{unfrozen[0]} was unfrozen during training, which only a single process supports"
        raise IncompatibleCheckpointError(f"{folder}: {problem}; resume with --plan dp=1")


def require_stored(targets: Mapping[str, Any], checkpoint: StoredCheckpoint) -> None:
    """Refuse an intact checkpoint that lacks tensors of this model."""
    missing = sorted(targets.keys() - checkpoint.entries.keys())
    if missing:
        problem = f"lacks {len(missing)} tensors of the model, the first is {missing[0]}"
        raise IncompatibleCheckpointError(f"{checkpoint.folder}: {problem}; start a new run in another folder")
