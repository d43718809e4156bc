"""Save and load a run: tensors through torch's distributed checkpoint, everything else in one JSON manifest. Nothing is pickled.

step-00000120/          written as step-00000120.partial and renamed: it exists completely or not at all
    rank-00000.bin ...  tensors as raw bytes, each rank's own, under full names: any plan reads what any plan wrote
    tensors.json        where each tensor's parts lie
    checkpoint.json     step, plan, state of optimizers and schedules, size and SHA-256 of every file above, and its own SHA-256
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from echelon.checkpoint_files import checkpoint_reader
from echelon.checkpoint_files.tensor_files import TensorWriter, damaged
from echelon.engine.backends.launch_servers import SERVER_FOLDER
from echelon.engine.buffers.buffer_sync import BufferTracker
from echelon.engine.checkpoint import model_extra_state, optimizer_state, schedule_state
from echelon.engine.checkpoint.compatibility import require_compatible, require_stored, unfreeze_stored
from echelon.engine.checkpoint.param_group_state import gather_optimizer_groups, match_stored_groups
from echelon.engine.checkpoint.read_history import ReadHistory
from echelon.engine.checkpoint.run_attributes import RunAttributes
from echelon.engine.parallel.shard_layout import ShardRegion, TPShard, full_tensor_shape, local_regions, to_local
from echelon.engine.run_state import RunState
from echelon.errors import CheckpointError
from echelon.files import atomic_write, sync_folder
from echelon.plan.codec import to_plain
from echelon.plan.sealed_json import seal

_State = dict[str, Any]
_Tensors = Mapping[str, Tensor]
_StateTensors = Mapping[str, optimizer_state.StateTensor]


def save(run: RunState, attributes: RunAttributes, reads: ReadHistory, buffers: BufferTracker, folder: Path) -> int:
    """Write the run's state to `folder`, which must not exist; returns its bytes. Every rank must call it."""
    partial_folder = folder.with_name(folder.name + ".partial")
    with run.ranks.raise_on_all_ranks():
        state = {"changing": buffers.mutable_buffers, "read": reads.collect()}
        if run.world.is_main:
            if (folder / checkpoint_reader.MANIFEST_FILE).exists():
                raise CheckpointError(f"{folder}: a checkpoint exists there")
            try:
                if partial_folder.is_symlink() or partial_folder.is_file():
                    partial_folder.unlink()
                shutil.rmtree(partial_folder, ignore_errors=True)
                partial_folder.mkdir(parents=True)
            except OSError as error:
                raise _to_checkpoint_error(error, folder) from error
    try:
        return _write_checkpoint(run, attributes, state, folder, partial_folder)
    except (Exception, CheckpointException) as error:  # torch's is not an Exception
        if run.world.is_main:
            shutil.rmtree(partial_folder, ignore_errors=True)
        raise _to_checkpoint_error(error, folder) from error


def _write_checkpoint(run: RunState, attributes: RunAttributes, state: _State, folder: Path, partial: Path) -> int:
    writer = TensorWriter(partial)
    model_tensors, extra_state = model_extra_state.split_model_state(run)
    extra_state, extra_tensors = model_extra_state.collect_extra_state(run, extra_state)
    optimizers, state_tensors = optimizer_state.collect(run)
    attribute_entries, attribute_tensors = attributes.collect()
    groups = gather_optimizer_groups(run)
    tensors = _name_tensors(run, model_tensors, extra_tensors, attribute_tensors, state_tensors)
    with checkpoint_reader.without_single_process_warning():
        save_tensors(tensors, storage_writer=writer, no_dist=run.world.size == 1)
    served = run.backend.save(partial / SERVER_FOLDER)
    with run.ranks.raise_on_all_ranks():
        rank_files = dict(writer.files)
        server_files = (partial / SERVER_FOLDER).rglob("*") if run.world.is_main else ()
        for path in filter(Path.is_file, server_files):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            rank_files[str(path.relative_to(partial))] = {"bytes": path.stat().st_size, "sha256": digest}
    files = {name: entry for entries in run.ranks.all_gather_object(rank_files) for name, entry in entries.items()}
    state |= {
        "optimizers": [{"groups": group, **encoded} for group, encoded in zip(groups, optimizers, strict=True)],
        "schedules": [schedule_state.collect_common_state(schedule) for schedule in run.schedules],
        "extra_state": extra_state,
        "served": served,
        "attributes": attribute_entries,
    }
    with run.ranks.raise_on_all_ranks():
        if run.world.is_main:
            manifest = seal(_make_manifest(run, files, state), indent=1)
            atomic_write(partial / checkpoint_reader.MANIFEST_FILE, manifest)
            os.replace(partial, folder)
            sync_folder(folder.parent)
    return sum(entry["bytes"] for entry in files.values())


def _name_tensors(run: RunState, model: _Tensors, extra: _Tensors, held: _Tensors, optimizer: _StateTensors) -> _State:
    tp_shards = run.tp_shards
    named = {f"model/{name}": to_checkpoint_tensor(value, tp_shards.get(name)) for name, value in model.items()}
    named |= {f"extra/{path}": value for path, value in extra.items()}
    named |= {f"held/{path}": value for path, value in held.items()}
    for path, item in optimizer.items():
        named[f"optimizer/{path}"] = to_checkpoint_tensor(item.value, tp_shards.get(item.layout_parameter))
    return named


def _make_manifest(run: RunState, files: dict[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": checkpoint_reader.CHECKPOINT_FORMAT,
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
    """Restore what was saved to `folder`, under whatever plan; returns its read history where that applies. Every rank must call it."""
    groups = gather_optimizer_groups(run)
    with run.ranks.raise_on_all_ranks():
        checkpoint = checkpoint_reader.open_checkpoint(folder, run.world)
        manifest = checkpoint.manifest
        with _raise_as_damaged(folder):
            unfreeze_stored(run, manifest, groups, folder)
    groups = gather_optimizer_groups(run)
    with run.ranks.raise_on_all_ranks(), _raise_as_damaged(folder):
        require_compatible(run, manifest, groups, folder)
        # A stage may lack what others have: it must raise before the others wait for it in torch's load.
        _allocate_buffers(run, checkpoint)
        model_tensors, _ = model_extra_state.split_model_state(run)
        optimizer_loader = optimizer_state.OptimizerLoader(run, checkpoint)
        extra_loader = model_extra_state.ExtraStateLoader(run, checkpoint)
        attribute_tensors = attributes.allocate_targets(checkpoint)
        attributes.require_compatible(manifest, folder)
        targets = _name_tensors(run, model_tensors, extra_loader.targets, attribute_tensors, optimizer_loader.targets)
        require_stored(targets, checkpoint)
    checkpoint.load_into(targets, is_single_process=run.world.size == 1)
    with run.ranks.raise_on_all_ranks(), _raise_as_damaged(folder):
        if derived_names := model_extra_state.find_derived_tensors(run, model_tensors):
            run.model.load_state_dict({name: model_tensors[name] for name in derived_names}, strict=False)
        extra_loader.apply()
        attributes.restore(manifest)
        optimizer_loader.apply()
        records = zip(manifest["schedules"], manifest["optimizers"], strict=False)
        for optimizer, schedule, (encoded, stored) in zip(run.optimizers, run.schedules, records, strict=False):
            matched_groups = match_stored_groups(run, optimizer, stored["groups"])
            schedule_state.restore_state(schedule, encoded, [group["schedule"] for group in matched_groups])
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
    """Missing manifest entries, and entries of another type, are damage, not programming errors."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"does not fit what it describes ({type(error).__name__}: {error})"
        raise damaged(folder / checkpoint_reader.MANIFEST_FILE, reason) from error


def _allocate_buffers(run: RunState, checkpoint: checkpoint_reader.StoredCheckpoint) -> None:
    """Allocate buffers that the model registers as None and sets during training."""
    modules = dict(run.model.named_modules())
    for name, entry in checkpoint.entries.items():
        path, _, key = name.removeprefix("model/").rpartition(".")
        buffers = modules[path]._buffers if name.startswith("model/") and path in modules else {}
        if key in buffers and buffers[key] is None:
            buffers[key] = torch.empty(entry.shape, dtype=entry.dtype, device=run.device)


def _to_checkpoint_error(error: BaseException, folder: Path) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    text = str(error)
    if os.strerror(errno.ENOSPC) in text or getattr(error, "errno", None) == errno.ENOSPC:
        free = shutil.disk_usage(folder.parent).free if folder.parent.exists() else 0
        problem = f"the disk is full ({free / 2**20:,.0f} MiB free): not saved, nothing else was changed"
        return CheckpointError(f"{folder}: {problem}; free some space or use another --out")
    return CheckpointError(f"{folder}: not saved ({type(error).__name__}: {text[:300]})")


def to_checkpoint_tensor(tensor: Tensor, tp_shard: TPShard | None) -> Tensor:
    """`tensor` for torch's planners: with its region of the full tensor if it is laid out as `tp_shard`."""
    if tp_shard is None or tensor.shape != tp_shard.local_shape:
        return tensor
    # No rank has a region of a tensor without elements.
    return CheckpointTensor(tensor, tp_shard) if tp_shard.full_shape.numel() else tensor.new_empty(tp_shard.full_shape)


class CheckpointTensor(Tensor):
    """This rank's regions in coordinates of the full tensor. torch's distributed checkpoint calls the methods below, as on a DTensor."""

    _regions: list[ShardRegion]

    @staticmethod
    def __new__(cls, tensor: Tensor, tp_shard: TPShard | None) -> CheckpointTensor:
        local, shape = to_local(tensor), full_tensor_shape(tensor, tp_shard)
        wrapper: CheckpointTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        wrapper._regions = local_regions(tensor, tp_shard)
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: a sharded tensor that can be saved and loaded, but not computed with")

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        items = []
        for chunk, region in zip(self.__create_chunk_list__(), self._regions, strict=True):
            data = TensorWriteData(chunk, dcp.TensorProperties.create_from_tensor(region.values), self.size())
            items.append(WriteItem(dcp.MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[dcp.ChunkStorageMetadata]:
        return [dcp.ChunkStorageMetadata(torch.Size(region.offsets), region.values.shape) for region in self._regions]

    def __get_tensor_shard__(self, index: dcp.MetadataIndex) -> Tensor:
        return next(region.values for region in self._regions if torch.Size(region.offsets) == index.offset)
