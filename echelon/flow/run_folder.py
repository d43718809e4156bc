"""The folder of one run, and which of its checkpoints are kept.

runs/digits/
    job.json plan.json forecast.json profile.json cluster.json certificate.json
    events.jsonl tensorboard/ report.html run.lock checked.json
    checkpoints/step-00000120/ ...  best.json
    checkpoints/step-00000140.doubted/      saved after the last correct step, before a check failed; never resumed from
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from echelon.errors import DocumentError, EchelonError, FileLockError
from echelon.files import acquire_lock, atomic_write, describe_holders
from echelon.flow.run_settings import JobRecord, describe_input_changes
from echelon.plan.certificate import Certificate
from echelon.plan.cluster import Cluster
from echelon.plan.codec import Document
from echelon.plan.forecast import Forecast
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile

_PREFIX = "step-"
_BEST_FILE, _CHECKED_FILE = "best.json", "checked.json"


class RunFolder:
    """A run's files. Only rank 0 writes here, except for checkpoints."""

    def __init__(self, path: Path, *, keep: int) -> None:
        self.path, self._keep = path, keep
        self.checkpoints = path / "checkpoints"

    def lock(self) -> AbstractContextManager[object]:
        """Lock the folder, creating it if needed: two trainings would overwrite each other's checkpoints and mix their events."""
        path = self.path / "run.lock"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return acquire_lock(path)
        except FileLockError:
            return contextlib.nullcontext()  # a file system without locks: another training cannot be detected
        except TimeoutError:
            problem = f"another training uses this folder ({describe_holders(path)})"
            remedy = "wait for it, end it, or give another folder: --out FOLDER"
            raise EchelonError(f"{self.path}: {problem}; {remedy}") from None
        except OSError as error:
            raise _unwritable_error(self.path, error) from error

    def write_documents(self, documents: Sequence[Document | None]) -> None:
        """Keep the documents of this start and delete those of an earlier one."""
        by_kind = {document.KIND: document for document in documents if document is not None}
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable_error(self.path, error) from error
        for kind in (each.KIND for each in (Plan, Forecast, Profile, Cluster, Certificate)):
            path = self.path / f"{kind}.json"
            if kind not in by_kind:
                path.unlink(missing_ok=True)
            elif not _is_unchanged(path, by_kind[kind]):
                by_kind[kind].save(path)

    def read_certificate(self) -> Certificate | None:
        with contextlib.suppress(DocumentError):
            return Certificate.load(self.path / f"{Certificate.KIND}.json")
        return None

    def write_record(self, record: JobRecord) -> None:
        try:
            atomic_write(self.path / "job.json", json.dumps(dataclasses.asdict(record), indent=1) + "\n")
        except OSError as error:
            raise _unwritable_error(self.path, error) from error

    def read_last_results(self, step: int) -> tuple[float | None, dict[str, float] | None]:
        """Loss of the last step, and metrics of the evaluation at `step`; None where the log has none."""
        from echelon.observer import read_events

        with contextlib.suppress(EchelonError, OSError):
            last_events = {event.kind: event for event in read_events(self.path)}
            loss = last_events["step"].data.get("loss") if "step" in last_events else None
            evaluation = last_events.get("evaluation")
            if evaluation is None or evaluation.step != step:
                return loss, None
            return loss, dict(evaluation.data.get("metrics", {}))
        return None, None

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints / f"{_PREFIX}{step:08d}"

    def list_checkpoints(self) -> list[Path]:
        """Complete checkpoints, newest first, without symbolic links: they may be another run's."""
        return sorted(filter(_is_checkpoint, self._list_numbered()), reverse=True)

    def _list_numbered(self) -> list[Path]:
        paths = self.checkpoints.glob(f"{_PREFIX}*")
        return [path for path in paths if re.fullmatch("[0-9]+", path.name.removeprefix(_PREFIX))]

    def clear_leftovers(self) -> list[str]:
        """Delete what interrupted writes left behind; warnings about what is no checkpoint and stays."""
        warnings = []
        for path in sorted(self.checkpoints.glob(f"{_PREFIX}*.partial")):
            self.delete_checkpoint(path)
        for path in sorted(self._list_numbered()):
            if path.is_symlink():
                warnings.append(f"{path}: a symbolic link, not a checkpoint of this run; it is not read")
            elif not path.is_dir():
                what = "a file where a checkpoint's folder goes"
                warnings.append(f"{path}: {what}; it is not read, and deleted when that checkpoint is saved")
        return warnings

    def best_checkpoint(self, evaluation_digest: str = "", step: int | None = None) -> tuple[Path, float] | None:
        """The checkpoint with the lowest evaluation loss, and that loss; only if its evaluation had `evaluation_digest`, and if it is not
        after `step`, from which training is repeated."""
        best = self._read_best()
        if best is None or (evaluation_digest and best[2] != evaluation_digest):
            return None
        return None if step is not None and best[0].name > self.checkpoint_path(step).name else best[:2]

    def drop_stale_best(self, evaluation_digest: str, step: int) -> str:
        """Delete the note of the best where it cannot be compared with evaluations by `evaluation_digest` after `step`; why, or ""."""
        best_path = self.checkpoints / _BEST_FILE
        if not best_path.exists() or self.best_checkpoint(evaluation_digest, step) is not None:
            return ""
        best = self._read_best()
        reason = "the evaluation data, the loss or the collation changed"
        if best is None or best[2] == evaluation_digest:
            reason = "its checkpoint is gone, damaged or written again, or its loss is not finite"
        with contextlib.suppress(OSError):
            best_path.unlink()
        return f"{best_path}: no longer the best, because {reason}; the next evaluation is compared with none before it"

    def _read_best(self) -> tuple[Path, float, str] | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            document = json.loads((self.checkpoints / _BEST_FILE).read_text())
            path, loss = self.checkpoints / Path(str(document["checkpoint"])).name, float(document["loss"])
            is_unchanged = _is_checkpoint(path) and document["manifest"] == _manifest_digest(path)
            return (path, loss, str(document["judge"])) if is_unchanged and math.isfinite(loss) else None
        return None

    def write_best(self, checkpoint: Path, loss: float, evaluation_digest: str) -> None:
        """Remember the best. `evaluation_digest`: of what it was evaluated with."""
        document = {"checkpoint": checkpoint.name, "loss": loss, "judge": evaluation_digest}
        document["manifest"] = _manifest_digest(checkpoint)
        atomic_write(self.checkpoints / _BEST_FILE, json.dumps(document))

    def last_checked_step(self) -> int:
        """The last step up to which checkpoints are known to be correct; 0: none."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads((self.path / _CHECKED_FILE).read_text())["step"])
        return 0

    def write_checked_step(self, step: int) -> None:
        """Remember that checkpoints up to `step` are correct."""
        atomic_write(self.path / _CHECKED_FILE, json.dumps({"step": step}))

    def newest_checked(self) -> Path | None:
        checked_step = self.last_checked_step()
        return next((path for path in self.list_checkpoints() if _step_of(path) <= checked_step), None)

    def quarantine_after(self, checked_step: int) -> list[Path]:
        """Set checkpoints after step `checked_step` aside, so that none is resumed from; their new names."""
        quarantined = []
        for path in self.list_checkpoints():
            if _step_of(path) > checked_step:
                quarantine_path = path.with_name(f"{path.name}.doubted")
                shutil.rmtree(quarantine_path, ignore_errors=True)
                quarantined.append(path.rename(quarantine_path))
        return quarantined

    def prune(self) -> None:
        """Delete leftovers and all checkpoints but the last `keep`, the best and the newest checked one. Never while one is written."""
        best, checked = self.best_checkpoint(), self.newest_checked()
        for path in self.list_checkpoints()[self._keep :]:
            if path != checked and (best is None or path != best[0]):
                self.delete_checkpoint(path)
        for path in self.checkpoints.glob(f"{_PREFIX}*"):
            if path.name.endswith(".partial") or (path.is_dir() and not path.is_symlink() and not _is_checkpoint(path)):
                self.delete_checkpoint(path)

    def delete_checkpoint(self, checkpoint: Path) -> None:
        """Delete a checkpoint; a symbolic link, not its target."""
        with contextlib.suppress(OSError):
            if checkpoint.is_symlink() or not checkpoint.is_dir():
                checkpoint.unlink(missing_ok=True)
                return
            if _is_checkpoint(checkpoint):
                _manifest_path(checkpoint).unlink()  # first: a half-deleted checkpoint must not count as one
        shutil.rmtree(checkpoint, ignore_errors=True)


def require_writable(path: Path) -> None:
    """Refuse a folder that cannot be written before anything is measured for it; create nothing."""
    parent = path.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise _unwritable_error(path, f"{parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise _unwritable_error(path, f"{parent} cannot be written")


def _unwritable_error(path: Path, cause: OSError | str) -> EchelonError:
    reason = cause if isinstance(cause, str) else cause.strerror or str(cause)
    remedy = "make it writable, or name another: --out FOLDER (out= in Python)"
    return EchelonError(f"{path}: the run's folder cannot be written ({reason}); {remedy}")


def _is_unchanged(path: Path, document: Document) -> bool:
    """Whether the file has these contents; an unchanged one keeps its date."""
    try:
        return path.read_text(encoding="utf-8") == document.to_json() + "\n"
    except (OSError, ValueError):
        return False


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def _manifest_path(checkpoint: Path) -> Path:
    # Imports torch, which the process that only starts ranks does not load.
    from echelon.checkpoint_files.checkpoint_reader import MANIFEST_FILE

    return checkpoint / MANIFEST_FILE


def _is_checkpoint(path: Path) -> bool:
    return not path.is_symlink() and _manifest_path(path).is_file()


def _manifest_digest(checkpoint: Path) -> str:
    return hashlib.sha256(_manifest_path(checkpoint).read_bytes()).hexdigest()


def read_record(path: Path) -> JobRecord:
    """The record of the job that trained last in the run folder `path`."""
    with contextlib.suppress(OSError, ValueError):
        return JobRecord.from_plain(json.loads((path / "job.json").read_text()))
    return JobRecord()


def choose_run_folder(
    folder: str | Path | None, name: str, *, fresh: bool, inputs: Mapping[str, str] | None = None
) -> tuple[Path, str]:
    """The run's folder, and why it is not runs/NAME where that one has another job's run.

    `folder`, or among runs/NAME, runs/NAME-2, ... the first that was made from the same inputs. A fresh run takes the next free name.
    """
    path = Path("runs") / "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    path = path if folder is None else Path(folder)
    if not path.exists() or (folder is not None and not fresh):
        return path, ""
    if fresh:
        return _next_free_name(path), ""
    reason = ""
    for candidate in _candidate_folders(path):
        changes = describe_input_changes(read_record(candidate).inputs, inputs) if inputs is not None else []
        if not changes:
            is_other = f"{candidate} is the run's folder, because {path} has a run with {reason}"
            return candidate, is_other if reason else ""
        reason = reason or "; ".join(changes)
    raise AssertionError("there is always a free name")


def _candidate_folders(path: Path) -> Iterator[Path]:
    """runs/NAME, those of runs/NAME-2, ... that exist, and the first that does not."""
    yield path
    pattern = re.compile(re.escape(path.name) + r"-(\d+)")
    matches = [match for sibling in path.parent.iterdir() if (match := pattern.fullmatch(sibling.name))]
    for number in sorted(int(match[1]) for match in matches):
        if number > 1:
            yield path.with_name(f"{path.name}-{number}")
    yield _next_free_name(path)


def _next_free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(name for name in names if not name.exists())
