"""Checkpoints: torch's distributed checkpoint for the tensors, one JSON manifest for the rest.

    step-00000120/
        __0_0.distcp ...    tensors, each rank's own, under unsharded names: any plan can read what any plan wrote
        .metadata           where each tensor's parts lie (torch's)
        checkpoint.json     step, plan, optimizer settings, schedules, and size and SHA-256 of every file above

A checkpoint is written beside its place and renamed into it once the manifest is there: it exists whole or not at all.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from echelon.engine import groups, state
from echelon.engine.keeper import FOLDER
from echelon.engine.layout import Spread, whole_shape
from echelon.engine.stored import FORMAT, MANIFEST, Reader, quietly, read_manifest, require_whole, sha256
from echelon.errors import CheckpointError, ForeignCheckpoint
from echelon.plan.codec import to_plain

if TYPE_CHECKING:
    from echelon.engine.run import Run


def save(run: Run, folder: Path) -> int:
    """Write the run's state to `folder` (which must not exist); returns its bytes. Every rank must call it."""
    run.settle()
    run.meet()
    partial = folder.with_name(folder.name + ".partial")
    with run.ranks.together():
        if run.world.main:
            if (folder / MANIFEST).exists():
                raise CheckpointError(f"{folder}: there is a checkpoint already")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    try:
        return _save(run, folder, partial)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        if run.world.main:
            shutil.rmtree(partial, ignore_errors=True)
        raise _named(error, folder) from error


def _save(run: Run, folder: Path, partial: Path) -> int:
    with quietly():
        save_tensors(
            _tensors(run), storage_writer=FileSystemWriter(partial, sync_files=True), no_dist=run.world.size == 1
        )
    if run.hub is not None:
        run.hub.save(partial / FOLDER)
    with run.ranks.together():
        mine = [path for path in partial.iterdir() if path.name.startswith(f"__{run.world.rank}_")]
        if run.world.main:
            mine += [partial / ".metadata", *(path for path in (partial / FOLDER).rglob("*") if path.is_file())]
        sums = {str(path.relative_to(partial)): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in mine}
    files = {name: entry for part in run.ranks.gather(sums) for name, entry in part.items()}
    optimizers = groups.optimizer_plain(run)
    with run.ranks.together():
        if run.world.main:
            _write(partial / MANIFEST, json.dumps(_manifest(run, files, optimizers), indent=1))
            os.replace(partial, folder)
            _sync(folder.parent)
    return sum(entry["bytes"] for entry in files.values())


def _tensors(run: Run) -> dict[str, Any]:
    """What this rank holds, whole tensors as they are (torch writes each once) and parts with their places."""
    model = {f"model/{name}": _stored(run, name, value) for name, value in _model(run).items()}
    moments = state.optimizer_tensors(run).items()  # of parameters that servers train they have none
    return model | {f"optimizer/{name}": _stored(run, name, value) for name, value in moments}


def _model(run: Run) -> dict[str, Tensor]:
    """The model's tensors but those that other stages hold."""
    served = run.hub.names if run.hub is not None else frozenset()
    held = run.model.state_dict().items()
    return {name: value.detach() for name, value in held if not value.is_meta and name not in served}


def _stored(run: Run, name: str, value: Tensor) -> Any:
    piece = state.piece_of(run, name, value)
    return value if piece is None else Spread(value, piece)


def _manifest(run: Run, files: dict[str, Any], optimizers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": run.step_number,
        "job": run.job.name or "job",
        "plan": to_plain(run.plan),
        "ranks": run.world.size,
        "batch": run.job.batch,
        "seed": run.job.seed,
        "samples": run.samples,
        "order": run.order,
        "content": run.content,
        "model": run.fingerprint,
        "parameters": run.shapes,
        "optimizers": optimizers,
        "schedules": groups.schedule_plain(run),
        "loss_scale": None if run.loss_scale is None else [run.loss_scale.scale, run.loss_scale.good],
        "nominal": run.nominal,
        "changing": run.changing,
        "served": None if run.hub is None else {"trained": sorted(run.hub.trained), "updates": run.hub.updates},
        "torch": torch.__version__,
        "files": files,
    }


def load(run: Run, folder: Path) -> None:
    """Bring the run to where `folder` was saved, whatever plan saved it. Every rank must call it."""
    optimizers = groups.optimizer_plain(run)
    with run.ranks.together():
        manifest = read_manifest(folder)
        _require_fits(run, manifest, optimizers, folder)
        require_whole(folder, manifest, run.world)
        # A stage may lack what others have: it must say so before they wait for it in torch's reading.
        reader = Reader(folder)
        metadata = reader.read_metadata()
        _make_room(run, metadata)
        moments = _room(run, metadata, folder)
        wanted = {f"model/{name}": _stored(run, name, value) for name, value in _model(run).items()}
        wanted |= {f"optimizer/{name}": _stored(run, name, value) for name, value in moments.items()}
        _require_there(wanted, metadata, folder)
    try:
        with quietly():
            load_tensors(wanted, storage_reader=reader, no_dist=run.world.size == 1)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{folder}: could not be read ({error})") from error
    with run.ranks.together():
        groups.set_optimizers(run, moments, manifest)
        groups.set_schedules(run, manifest)
    if run.loss_scale is not None and manifest["loss_scale"] is not None:
        run.loss_scale.scale, run.loss_scale.good = manifest["loss_scale"]
    if run.hub is not None:
        run.hub.load(folder / FOLDER, manifest["step"])
        run.hub.updates = manifest["served"]["updates"]
    run.nominal = manifest["nominal"]
    run.expect_changes(manifest["changing"])
    run.step_number = manifest["step"]


def _make_room(run: Run, metadata: Metadata) -> None:
    """Buffers that a model only declares (None) and fills while it trains: without a tensor there they would start anew."""
    modules = dict(run.model.named_modules())
    for name, entry in metadata.state_dict_metadata.items():
        path, _, key = name.removeprefix("model/").rpartition(".")
        buffers = modules[path]._buffers if name.startswith("model/") and path in modules else {}
        if key in buffers and buffers[key] is None and isinstance(entry, TensorStorageMetadata):
            buffers[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device=run.device)


def _room(run: Run, metadata: Metadata, folder: Path) -> dict[str, Tensor]:
    """Room for the optimizers' tensors of this rank's parameters, laid out as those are."""
    parameters, found = dict(run.model.named_parameters()), {}
    for path, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{folder}: {path} is not a tensor; echelon stores only tensors there")
        if not path.startswith("optimizer/"):
            continue
        name = path.split("/", 3)[2]
        parameter = parameters.get(name)
        if parameter is None:
            raise ForeignCheckpoint(f"{folder}: optimizer state for {name}, which the model does not have")
        if parameter.is_meta:
            continue
        if entry.size == whole_shape(parameter, run.pieces.get(name)):
            room = torch.empty_like(parameter, dtype=entry.properties.dtype).detach()
        else:
            where = run.device if entry.size else torch.device("cpu")
            room = torch.empty(entry.size, dtype=entry.properties.dtype, device=where)
        found[path.removeprefix("optimizer/")] = room
    return found


def _require_there(wanted: Mapping[str, Any], metadata: Metadata, folder: Path) -> None:
    lost = sorted(set(wanted) - set(metadata.state_dict_metadata))
    if lost:
        # Its files are as they were written: they are another model's.
        raise ForeignCheckpoint(
            f"{folder}: lacks {len(lost)} tensors of the model, the first is {lost[0]}; start anew in another folder"
        )


def _require_fits(run: Run, manifest: dict[str, Any], optimizers: list[dict[str, Any]], folder: Path) -> None:
    if manifest["model"] != run.fingerprint:
        here, there = run.shapes, manifest["parameters"]
        name = next((n for n in [*here, *there] if here.get(n) != there.get(n)), "a dtype")
        raise ForeignCheckpoint(
            f"{folder}: made by another model: {name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here; "
            "give --fresh to start anew in another folder"
        )
    _require_same_servers(run, manifest, folder)
    groups.require_groups(run, manifest, optimizers, folder)
    if len(manifest["schedules"]) != len(run.schedules):
        raise ForeignCheckpoint(
            f"{folder}: made with {len(manifest['schedules'])} schedules, the job now has {len(run.schedules)} (schedule= gives one "
            "per optimizer): learning rates would not go on as they were; put it back, or start anew in another folder with "
            "weights= from this one"
        )
    _require_same_data(run, manifest, folder)


def _require_same_servers(run: Run, manifest: dict[str, Any], folder: Path) -> None:
    """What servers train has its state with them, in files that ranks do not read; and the other way round."""
    there = (manifest.get("served") or {}).get("trained", [])
    here = [] if run.hub is None else sorted(run.hub.trained)
    if there == here:
        return
    one = next(name for name in (*there, *here) if (name in there) != (name in here))
    told, now = ("a parameter server", "the ranks") if one in there else ("the ranks", "a parameter server")
    raise ForeignCheckpoint(
        f"{folder}: {one} was trained by {told} there, and by {now} under this plan: the optimizer's state cannot pass; go on under a plan as "
        "it was (exchange=, dense=, rows=), or export the weights and start anew with weights= from them"
    )


def _require_same_data(run: Run, manifest: dict[str, Any], folder: Path) -> None:
    """A step number is a place in one order of one data set: in another, samples would be repeated and left out."""
    back = "put it back, or start anew in another folder with weights= from this one"
    for name, mine in (("batch", run.job.batch), ("seed", run.job.seed), ("samples", run.samples)):
        if manifest[name] != mine:
            raise ForeignCheckpoint(
                f"{folder}: made with {name}={manifest[name]}, the job now has {mine}: the order of samples would differ; {back}"
            )
    # Checkpoints that do not tell are of the time when there was this rule alone.
    order = manifest.get("order", None if run.order is None else "shuffled whole")
    if order != run.order:
        raise ForeignCheckpoint(
            f"{folder}: its samples were {order}, the job's are {run.order}: the order would differ (files, lanes=, window=, bucket= of "
            f"packed data decide it, and echelon's version for very large sets); {back}"
        )
    content = manifest.get("content", run.content)
    if content != run.content:
        raise ForeignCheckpoint(
            f"{folder}: made with packed data that held {content or 'no such text'}, the job's holds {run.content or 'none'} "
            f"(a hash of columns and checksums): other samples; {back}"
        )


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make a rename in `folder` outlive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _named(error: BaseException, folder: Path) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    text = str(error)
    if os.strerror(errno.ENOSPC) in text or getattr(error, "errno", None) == errno.ENOSPC:
        free = shutil.disk_usage(folder.parent).free if folder.parent.exists() else 0
        return CheckpointError(
            f"{folder}: the disk is full ({free / 2**20:,.0f} MiB free): not saved, nothing else was touched; free some space or use another --out"
        )
    return CheckpointError(f"{folder}: not saved ({type(error).__name__}: {text[:300]})")
