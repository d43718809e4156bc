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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from echelon.engine.backends.launch_servers import FOLDER
from echelon.engine.checkpoint import model_extra_state, optimizer_state, schedule_state
from echelon.engine.checkpoint.checkpoint_reader import FORMAT, MANIFEST, Stored, open_stored, quietly, sha256
from echelon.engine.checkpoint.param_group_state import optimizer_groups, own_groups, require_groups
from echelon.engine.checkpoint.tensor_storage import Writer
from echelon.engine.parallel.shard_layout import Spread
from echelon.errors import CheckpointError, ForeignCheckpoint
from echelon.plan.codec import to_plain
from echelon.plan.sealed_json import seal

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
            try:
                if partial.is_symlink() or partial.is_file():
                    partial.unlink()
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            except OSError as error:
                raise _named(error, folder) from error
    try:
        return _save(run, folder, partial)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        if run.world.main:
            shutil.rmtree(partial, ignore_errors=True)
        raise _named(error, folder) from error


def _save(run: Run, folder: Path, partial: Path) -> int:
    writer = Writer(partial)
    tensors, extra = model_extra_state.split_model(run)
    extra_state, extra_tensors = model_extra_state.collect_extra(run, extra)
    optimizers, moments = optimizer_state.collect(run)
    attributes, held = run.attributes.collect()
    groups = optimizer_groups(run)
    stored = {f"model/{name}": _spread(run, name, value) for name, value in tensors.items()}
    stored |= {f"extra/{name}": value for name, value in extra_tensors.items()}
    stored |= {f"held/{path}": value for path, value in held.items()}
    stored |= {f"optimizer/{path}": _spread(run, each.like, each.value) for path, each in moments.items()}
    with quietly():
        save_tensors(stored, storage_writer=writer, no_dist=run.world.size == 1)
    if run.hub is not None:
        run.hub.save(partial / FOLDER)
    with run.ranks.together():
        sums = dict(writer.files)
        if run.world.main:
            served = [path for path in (partial / FOLDER).rglob("*") if path.is_file()]
            sums |= {
                str(path.relative_to(partial)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
                for path in served
            }
    files = {name: entry for part in run.ranks.gather(sums) for name, entry in part.items()}
    state = {
        "optimizers": [{"groups": each, **kept} for each, kept in zip(groups, optimizers, strict=True)],
        "schedules": [schedule_state.common(each) for each in run.schedules],
        "extra_state": extra_state,
        "attributes": attributes,
    }
    with run.ranks.together():
        if run.world.main:
            _write(partial / MANIFEST, seal(_manifest(run, files, state), indent=1))
            _sync(partial)
            os.replace(partial, folder)
            _sync(folder.parent)
    return sum(entry["bytes"] for entry in files.values())


def _spread(run: Run, name: str, value: Tensor) -> Any:
    """A tensor as torch's planners take it: with its place in the whole where the tensor axis cuts the parameter `name`."""
    piece = run.pieces.get(name)
    if piece is None or value.shape != piece.shape:
        return value
    # No rank has a part of a tensor without elements.
    return Spread(value, piece) if piece.whole.numel() else value.new_empty(piece.whole)


def _manifest(run: Run, files: dict[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": run.step_number,
        "job": run.job.name or "job",
        "record": run.job_record,
        "plan": to_plain(run.plan),
        "ranks": run.world.size,
        "batch": run.job.batch,
        "seed": run.job.seed,
        "samples": run.samples,
        "order": run.order,
        "content": run.content,
        "model": run.fingerprint,
        "parameters": run.shapes,
        **state,
        "loss_scale": None if run.loss_scale is None else [run.loss_scale.scale, run.loss_scale.good],
        "nominal": run.nominal,
        "changing": run.changing,
        "read": run.read_history.collect(),
        "served": None if run.hub is None else {"trained": sorted(run.hub.trained), "updates": run.hub.updates},
        "torch": torch.__version__,
        "files": files,
    }


def load(run: Run, folder: Path) -> Any:
    """Bring the run to where `folder` was saved, whatever plan saved it; returns what it holds of what was read. Every rank must call it."""
    groups = optimizer_groups(run)
    with run.ranks.together():
        stored = open_stored(folder, run.world)
        manifest = stored.manifest
        with _damage_named(folder):
            _unfreeze(run, groups, manifest, folder)
    groups = optimizer_groups(run)
    with run.ranks.together(), _damage_named(folder):
        _require_fits(run, manifest, groups, folder)
        # A stage may lack what others have: it must say so before they wait for it in torch's reading.
        _make_room(run, stored)
        tensors, _ = model_extra_state.split_model(run)
        optimizers, extra = optimizer_state.Loading(run, stored), model_extra_state.LoadingExtra(run, stored)
        wanted = {f"model/{name}": _spread(run, name, value) for name, value in tensors.items()}
        wanted |= {f"extra/{name}": value for name, value in extra.rooms.items()}
        wanted |= {f"held/{path}": value for path, value in run.attributes.rooms(stored).items()}
        run.attributes.require_fits(manifest, folder)
        wanted |= {f"optimizer/{path}": _spread(run, each.like, each.value) for path, each in optimizers.rooms.items()}
        _require_there(wanted, stored)
    stored.fill(wanted, alone=run.world.size == 1)
    with run.ranks.together(), _damage_named(folder):
        if made := model_extra_state.derived(run, tensors):
            run.model.load_state_dict({name: tensors[name] for name in made}, strict=False)
        extra.finish()
        run.attributes.restore(manifest)
        optimizers.finish()
        for index, schedule in enumerate(run.schedules[: len(manifest["schedules"])]):
            own = own_groups(run, run.optimizers[index], manifest["optimizers"][index]["groups"])
            schedule_state.set_state(schedule, manifest["schedules"][index], [each["schedule"] for each in own])
    if run.loss_scale is not None and manifest["loss_scale"] is not None:
        run.loss_scale.scale, run.loss_scale.good = manifest["loss_scale"]
    if run.hub is not None:
        run.hub.load(folder / FOLDER, manifest["step"])
        run.hub.updates = manifest["served"]["updates"]
    run.nominal = manifest["nominal"]
    run.expect_changes(manifest["changing"])
    run.step_number = manifest["step"]
    run.loaded_record = manifest.get("record")
    same = manifest["batch"] == run.job.batch and manifest["seed"] == run.job.seed
    return manifest.get("read") if same else None


@contextlib.contextmanager
def _damage_named(folder: Path) -> Iterator[None]:
    """A manifest of which something is missing or of another type is a damaged checkpoint, not a mistake in the program."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder / MANIFEST}: does not fit what it describes ({type(error).__name__}: {error}); use an older checkpoint"
        ) from error


def _unfreeze(run: Run, groups: list[list[dict[str, Any]]], manifest: Mapping[str, Any], folder: Path) -> None:
    """Have the optimizers, whose groups are `groups`, cover what the model unfroze while it trained."""
    here = {name for each in groups for group in each for name in group["names"]}
    there = [name for each in manifest["optimizers"] for group in each["groups"] for name in group["names"]]
    unfrozen = [name for name in there if name not in here]
    if not run.unfreeze(unfrozen):
        raise ForeignCheckpoint(
            f"{folder}: {unfrozen[0]} was unfrozen while it trained, which only one process can follow; go on with --plan dp=1"
        )


def _make_room(run: Run, stored: Stored) -> None:
    """Allocate buffers that the model declares as None and fills while it trains."""
    modules = dict(run.model.named_modules())
    for name, entry in stored.entries.items():
        path, _, key = name.removeprefix("model/").rpartition(".")
        buffers = modules[path]._buffers if name.startswith("model/") and path in modules else {}
        if key in buffers and buffers[key] is None:
            buffers[key] = torch.empty(entry.shape, dtype=entry.dtype, device=run.device)


def _require_there(wanted: Mapping[str, Any], stored: Stored) -> None:
    lost = sorted(set(wanted) - set(stored.entries))
    if lost:
        # Its files are as they were written: they are another model's.
        raise ForeignCheckpoint(
            f"{stored.folder}: lacks {len(lost)} tensors of the model, the first is {lost[0]}; start anew in another folder"
        )


def _require_fits(run: Run, manifest: dict[str, Any], groups: list[list[dict[str, Any]]], folder: Path) -> None:
    if manifest["model"] != run.fingerprint:
        here, there = run.shapes, manifest["parameters"]
        name = next((n for n in [*here, *there] if here.get(n) != there.get(n)), "a dtype")
        raise ForeignCheckpoint(
            f"{folder}: made by another model: {name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here; "
            "give --fresh to start anew in another folder"
        )
    _require_same_servers(run, manifest, folder)
    require_groups(run, [each["groups"] for each in manifest["optimizers"]], groups, folder)
    if len(manifest["schedules"]) != len(run.schedules) and not run.replaces_schedules:
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
    order, content = manifest["order"], manifest["content"]
    if order != run.order:
        raise ForeignCheckpoint(
            f"{folder}: its samples were {order}, the job's are {run.order}: the order would differ (files, lanes=, window=, bucket= of "
            f"packed data decide it, and echelon's version for very large sets); {back}"
        )
    if content != run.content:
        raise ForeignCheckpoint(
            f"{folder}: made with packed data that held {content or 'no such text'}, the job's holds {run.content or 'none'} "
            f"(a hash of columns and checksums): other samples; {back}"
        )


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
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
