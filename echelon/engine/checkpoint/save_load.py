"""Checkpoints: torch's distributed checkpoint for the tensors, one JSON manifest for the rest. Data only: nothing is pickled.

    step-00000120/
        rank-00000.bin ...  tensors as raw bytes, each rank's own, under unsharded names: any plan can read what any plan wrote
        tensors.json        where each tensor's parts lie
        checkpoint.json     step, plan, state of optimizers and schedules, size and SHA-256 of every file above, and its own SHA-256

A checkpoint is written to step-00000120.partial and renamed once the manifest is there: it exists whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from echelon.checkpoint_files.checkpoint_reader import (
    CHECKPOINT_FORMAT,
    MANIFEST_FILE,
    StoredCheckpoint,
    hash_file,
    open_checkpoint,
    without_single_process_warning,
)
from echelon.checkpoint_files.tensor_storage import TensorWriter
from echelon.engine.backends.launch_servers import SERVER_FOLDER
from echelon.engine.buffers.buffer_sync import BufferTracker
from echelon.engine.checkpoint import model_extra_state, optimizer_state, schedule_state
from echelon.engine.checkpoint.param_group_state import (
    gather_optimizer_groups,
    match_stored_groups,
    require_matching_groups,
)
from echelon.engine.checkpoint.read_history import ReadHistory
from echelon.engine.checkpoint.run_attributes import RunAttributes
from echelon.engine.parallel.shard_layout import CheckpointTensor
from echelon.engine.run_state import RunState
from echelon.errors import CheckpointError, IncompatibleCheckpointError
from echelon.plan.codec import to_plain
from echelon.plan.sealed_json import seal


def save(
    run: RunState, attributes: RunAttributes, read_history: ReadHistory, buffer_tracker: BufferTracker, folder: Path
) -> int:
    """Write the run's state to `folder` (which must not exist); returns its bytes. Every rank must call it."""
    partial_folder = folder.with_name(folder.name + ".partial")
    with run.ranks.raise_on_all_ranks():
        if run.world.is_main:
            if (folder / MANIFEST_FILE).exists():
                raise CheckpointError(f"{folder}: there is a checkpoint already")
            try:
                if partial_folder.is_symlink() or partial_folder.is_file():
                    partial_folder.unlink()
                shutil.rmtree(partial_folder, ignore_errors=True)
                partial_folder.mkdir(parents=True)
            except OSError as error:
                raise _to_checkpoint_error(error, folder) from error
    try:
        return _write_checkpoint(run, attributes, read_history, buffer_tracker, folder, partial_folder)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        if run.world.is_main:
            shutil.rmtree(partial_folder, ignore_errors=True)
        raise _to_checkpoint_error(error, folder) from error


def _write_checkpoint(
    run: RunState,
    attributes: RunAttributes,
    read_history: ReadHistory,
    buffer_tracker: BufferTracker,
    folder: Path,
    partial_folder: Path,
) -> int:
    writer = TensorWriter(partial_folder)
    tensors, extra = model_extra_state.split_model_state(run)
    extra_state, extra_tensors = model_extra_state.collect_extra_state(run, extra)
    optimizers, state_tensors = optimizer_state.collect(run)
    attribute_entries, attribute_tensors = attributes.collect()
    groups = gather_optimizer_groups(run)
    tensors_to_save = {f"model/{name}": _to_checkpoint_tensor(run, name, value) for name, value in tensors.items()}
    tensors_to_save |= {f"extra/{name}": value for name, value in extra_tensors.items()}
    tensors_to_save |= {f"held/{path}": value for path, value in attribute_tensors.items()}
    tensors_to_save |= {
        f"optimizer/{path}": _to_checkpoint_tensor(run, each.layout_parameter, each.value)
        for path, each in state_tensors.items()
    }
    with without_single_process_warning():
        save_tensors(tensors_to_save, storage_writer=writer, no_dist=run.world.size == 1)
    served = run.backend.save(partial_folder / SERVER_FOLDER)
    with run.ranks.raise_on_all_ranks():
        file_entries = dict(writer.files)
        if run.world.is_main:
            server_files = [path for path in (partial_folder / SERVER_FOLDER).rglob("*") if path.is_file()]
            file_entries |= {
                str(path.relative_to(partial_folder)): {"bytes": path.stat().st_size, "sha256": hash_file(path)}
                for path in server_files
            }
    files = {
        name: entry
        for rank_entries in run.ranks.all_gather_object(file_entries)
        for name, entry in rank_entries.items()
    }
    state = {
        "optimizers": [
            {"groups": each, **encoded_state} for each, encoded_state in zip(groups, optimizers, strict=True)
        ],
        "schedules": [schedule_state.collect_common_state(each) for each in run.schedules],
        "extra_state": extra_state,
        "changing": buffer_tracker.mutable_buffers,
        "read": read_history.collect(),
        "served": served,
        "attributes": attribute_entries,
    }
    with run.ranks.raise_on_all_ranks():
        if run.world.is_main:
            _write_durably(partial_folder / MANIFEST_FILE, seal(_make_manifest(run, files, state), indent=1))
            _sync_folder(partial_folder)
            os.replace(partial_folder, folder)
            _sync_folder(folder.parent)
    return sum(entry["bytes"] for entry in files.values())


def _to_checkpoint_tensor(run: RunState, name: str, tensor: Tensor) -> Any:
    """A tensor as torch's planners take it: with its place in the whole where the tensor axis cuts the parameter `name`."""
    tp_shard = run.tp_shards.get(name)
    if tp_shard is None or tensor.shape != tp_shard.local_shape:
        return tensor
    # No rank has a part of a tensor without elements.
    return CheckpointTensor(tensor, tp_shard) if tp_shard.full_shape.numel() else tensor.new_empty(tp_shard.full_shape)


def _make_manifest(run: RunState, files: dict[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": CHECKPOINT_FORMAT,
        "step": run.step_number,
        "job": run.job.name or "job",
        "record": run.job_record,
        "plan": to_plain(run.plan),
        "ranks": run.world.size,
        "batch": run.job.batch_size,
        "seed": run.job.seed,
        "samples": run.sample_count,
        "order": run.sample_order,
        "content": run.data_fingerprint,
        "model": run.fingerprint,
        "parameters": run.full_shapes,
        **state,
        "loss_scale": None if run.loss_scale is None else [run.loss_scale.scale, run.loss_scale.good_steps],
        "nominal": run.nominal_count,
        "torch": torch.__version__,
        "files": files,
    }


def load(run: RunState, attributes: RunAttributes, buffer_tracker: BufferTracker, folder: Path) -> Any:
    """Bring the run to where `folder` was saved, whatever plan saved it; returns what it holds of what was read. Every rank must call it."""
    groups = gather_optimizer_groups(run)
    with run.ranks.raise_on_all_ranks():
        checkpoint = open_checkpoint(folder, run.world)
        manifest = checkpoint.manifest
        with _raise_as_damaged(folder):
            _unfreeze_stored(run, groups, manifest, folder)
    groups = gather_optimizer_groups(run)
    with run.ranks.raise_on_all_ranks(), _raise_as_damaged(folder):
        _require_compatible(run, manifest, groups, folder)
        # A stage may lack what others have: it must say so before they wait for it in torch's reading.
        _allocate_buffers(run, checkpoint)
        tensors, _ = model_extra_state.split_model_state(run)
        optimizer_loader, extra_loader = (
            optimizer_state.OptimizerLoader(run, checkpoint),
            model_extra_state.ExtraStateLoader(run, checkpoint),
        )
        targets = {f"model/{name}": _to_checkpoint_tensor(run, name, value) for name, value in tensors.items()}
        targets |= {f"extra/{name}": value for name, value in extra_loader.targets.items()}
        targets |= {f"held/{path}": value for path, value in attributes.allocate_targets(checkpoint).items()}
        attributes.require_compatible(manifest, folder)
        targets |= {
            f"optimizer/{path}": _to_checkpoint_tensor(run, each.layout_parameter, each.value)
            for path, each in optimizer_loader.targets.items()
        }
        _require_stored(targets, checkpoint)
    checkpoint.load_into(targets, is_single_process=run.world.size == 1)
    with run.ranks.raise_on_all_ranks(), _raise_as_damaged(folder):
        if derived_names := model_extra_state.find_derived_tensors(run, tensors):
            run.model.load_state_dict({name: tensors[name] for name in derived_names}, strict=False)
        extra_loader.apply()
        attributes.restore(manifest)
        optimizer_loader.apply()
        for index, schedule in enumerate(run.schedules[: len(manifest["schedules"])]):
            matched_groups = match_stored_groups(run, run.optimizers[index], manifest["optimizers"][index]["groups"])
            schedule_state.restore_state(
                schedule, manifest["schedules"][index], [each["schedule"] for each in matched_groups]
            )
    if run.loss_scale is not None and manifest["loss_scale"] is not None:
        run.loss_scale.scale, run.loss_scale.good_steps = manifest["loss_scale"]
    run.backend.load(folder / SERVER_FOLDER, manifest["step"], manifest.get("served"))
    run.nominal_count = manifest["nominal"]
    buffer_tracker.assume_mutable(manifest["changing"])
    run.step_number = manifest["step"]
    run.loaded_record = manifest.get("record")
    is_same_order = manifest["batch"] == run.job.batch_size and manifest["seed"] == run.job.seed
    return manifest.get("read") if is_same_order else None


@contextlib.contextmanager
def _raise_as_damaged(folder: Path) -> Iterator[None]:
    """A manifest of which something is missing or of another type is a damaged checkpoint, not a mistake in the program."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder / MANIFEST_FILE}: does not fit what it describes ({type(error).__name__}: {error}); use an older checkpoint"
        ) from error


def _unfreeze_stored(
    run: RunState, groups: list[list[dict[str, Any]]], manifest: Mapping[str, Any], folder: Path
) -> None:
    """Have the optimizers, whose groups are `groups`, cover what the model unfroze while it trained."""
    current_names = {name for optimizer_groups in groups for group in optimizer_groups for name in group["names"]}
    stored_names = [
        name
        for optimizer_groups in manifest["optimizers"]
        for group in optimizer_groups["groups"]
        for name in group["names"]
    ]
    unfrozen = [name for name in stored_names if name not in current_names]
    if not run.unfreeze(unfrozen):
        raise IncompatibleCheckpointError(
            f"{folder}: {unfrozen[0]} was unfrozen while it trained, which only one process can follow; go on with --plan dp=1"
        )


def _allocate_buffers(run: RunState, checkpoint: StoredCheckpoint) -> None:
    """Allocate buffers that the model declares as None and fills while it trains."""
    modules = dict(run.model.named_modules())
    for name, entry in checkpoint.entries.items():
        path, _, key = name.removeprefix("model/").rpartition(".")
        buffers = modules[path]._buffers if name.startswith("model/") and path in modules else {}
        if key in buffers and buffers[key] is None:
            buffers[key] = torch.empty(entry.shape, dtype=entry.dtype, device=run.device)


def _require_stored(targets: Mapping[str, Any], checkpoint: StoredCheckpoint) -> None:
    missing = sorted(set(targets) - set(checkpoint.entries))
    if missing:
        # Its files are as they were written: they are another model's.
        raise IncompatibleCheckpointError(
            f"{checkpoint.folder}: lacks {len(missing)} tensors of the model, the first is {missing[0]}; start anew in another folder"
        )


def _require_compatible(
    run: RunState, manifest: dict[str, Any], groups: list[list[dict[str, Any]]], folder: Path
) -> None:
    if manifest["model"] != run.fingerprint:
        current_shapes, stored_shapes = run.full_shapes, manifest["parameters"]
        name = next(
            (
                parameter
                for parameter in [*current_shapes, *stored_shapes]
                if current_shapes.get(parameter) != stored_shapes.get(parameter)
            ),
            "a dtype",
        )
        raise IncompatibleCheckpointError(
            f"{folder}: made by another model: {name} is {stored_shapes.get(name, 'absent')} there and {current_shapes.get(name, 'absent')} here; "
            "give --fresh to start anew in another folder"
        )
    _require_same_servers(run, manifest, folder)
    require_matching_groups(
        run, [stored_optimizer["groups"] for stored_optimizer in manifest["optimizers"]], groups, folder
    )
    if len(manifest["schedules"]) != len(run.schedules) and not run.replaces_schedules:
        raise IncompatibleCheckpointError(
            f"{folder}: made with {len(manifest['schedules'])} schedules, the job now has {len(run.schedules)} (lr_schedule= gives one "
            "per optimizer): learning rates would not go on as they were; put it back, or start anew in another folder with "
            "weights= from this one"
        )
    _require_same_data(run, manifest, folder)


def _require_same_servers(run: RunState, manifest: dict[str, Any], folder: Path) -> None:
    """What servers train has its state with them, in files that ranks do not read; and the other way round."""
    stored_names = (manifest.get("served") or {}).get("trained", [])
    current_names = sorted(run.backend.server_trained)
    if stored_names == current_names:
        return
    moved_name = next(
        name for name in (*stored_names, *current_names) if (name in stored_names) != (name in current_names)
    )
    old_trainer, new_trainer = (
        ("a parameter server", "the ranks") if moved_name in stored_names else ("the ranks", "a parameter server")
    )
    raise IncompatibleCheckpointError(
        f"{folder}: {moved_name} was trained by {old_trainer} there, and by {new_trainer} under this plan: the optimizer's state cannot pass; go on under a plan as "
        "it was (exchange=, dense=, rows=), or export the weights and start anew with weights= from them"
    )


def _require_same_data(run: RunState, manifest: dict[str, Any], folder: Path) -> None:
    """A step number is a place in one order of one data set: in another, samples would be repeated and left out."""
    remedy = "put it back, or start anew in another folder with weights= from this one"
    for name, current in (("batch", run.job.batch_size), ("seed", run.job.seed), ("samples", run.sample_count)):
        if manifest[name] != current:
            raise IncompatibleCheckpointError(
                f"{folder}: made with {name}={manifest[name]}, the job now has {current}: the order of samples would differ; {remedy}"
            )
    order, content = manifest["order"], manifest["content"]
    if order != run.sample_order:
        raise IncompatibleCheckpointError(
            f"{folder}: its samples were {order}, the job's are {run.sample_order}: the order would differ (files, lanes=, window=, bucket= of "
            f"packed data decide it, and echelon's version for very large sets); {remedy}"
        )
    if content != run.data_fingerprint:
        raise IncompatibleCheckpointError(
            f"{folder}: made with packed data that held {content or 'no such text'}, the job's holds {run.data_fingerprint or 'none'} "
            f"(a hash of columns and checksums): other samples; {remedy}"
        )


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _to_checkpoint_error(error: BaseException, folder: Path) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    text = str(error)
    if os.strerror(errno.ENOSPC) in text or getattr(error, "errno", None) == errno.ENOSPC:
        free = shutil.disk_usage(folder.parent).free if folder.parent.exists() else 0
        return CheckpointError(
            f"{folder}: the disk is full ({free / 2**20:,.0f} MiB free): not saved, nothing else was touched; free some space or use another --out"
        )
    return CheckpointError(f"{folder}: not saved ({type(error).__name__}: {text[:300]})")
