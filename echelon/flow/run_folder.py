"""The folder of one run, and which of its checkpoints are kept.

runs/digits/
    job.json plan.json forecast.json profile.json cluster.json certificate.json
    events.jsonl tensorboard/ report.html run.lock checked.json
    checkpoints/step-00000120/ ...  best.json
    checkpoints/step-00000140.doubted/      written after the last step that was checked, before a check failed; never resumed from
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from echelon.errors import DocumentError, EchelonError
from echelon.files import atomic_write
from echelon.flow.run_settings import JobRecord, with_variables
from echelon.plan.certificate import Certificate
from echelon.plan.cluster import Cluster
from echelon.plan.codec import Document
from echelon.plan.forecast import Forecast
from echelon.plan.input_digests import describe_differences
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile

_PREFIX = "step-"
_BEST_FILE, _CHECKED_FILE = "best.json", "checked.json"


class RunFolder:
    """A run's files. Only rank 0 writes here, except for checkpoints."""

    def __init__(self, path: Path, *, keep: int) -> None:
        self.path, self._keep = path, keep
        self.checkpoints = path / "checkpoints"

    def write_documents(self, documents: Sequence[Document | None]) -> None:
        """Keep the documents of this start; of those that it lacks none stays behind from an earlier one."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable_error(self.path, error) from error
        documents_by_kind = {document.KIND: document for document in documents if document is not None}
        for document_type in (Plan, Forecast, Profile, Cluster, Certificate):
            path = self.path / f"{document_type.KIND}.json"
            if document_type.KIND in documents_by_kind:
                if not _is_unchanged(path, documents_by_kind[document_type.KIND]):
                    documents_by_kind[document_type.KIND].save(path)
            else:
                path.unlink(missing_ok=True)

    def read_certificate(self) -> Certificate | None:
        """The one that lies in the folder."""
        with contextlib.suppress(DocumentError):
            return Certificate.load(self.path / f"{Certificate.KIND}.json")
        return None

    def read_record(self) -> JobRecord:
        """What is known of the job that trained here last."""
        return read_record(self.path)

    def write_record(self, record: JobRecord) -> None:
        """Remember which job trains here."""
        try:
            atomic_write(self.path / "job.json", json.dumps(dataclasses.asdict(record), indent=1) + "\n")
        except OSError as error:
            raise unwritable_error(self.path, error) from error

    def read_last_results(self, step: int) -> tuple[float | None, dict[str, float] | None]:
        """Loss of the last step, and metrics of the evaluation at `step`, as far as the log has them; None: it has no such evaluation."""
        from echelon.observer import read_events

        with contextlib.suppress(EchelonError, OSError):
            last_events = {event.kind: event for event in read_events(self.path)}
            loss = last_events["step"].data.get("loss") if "step" in last_events else None
            evaluation = last_events.get("evaluation")
            is_evaluated = evaluation is not None and evaluation.step == step
            return loss, dict(evaluation.data.get("metrics", {})) if evaluation is not None and is_evaluated else None
        return None, None

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of `step` goes."""
        return self.checkpoints / f"{_PREFIX}{step:08d}"

    def list_checkpoints(self) -> list[Path]:
        """Whole checkpoints, newest first. A symbolic link is none: it may be another run's."""
        return sorted(filter(_is_checkpoint, self._list_numbered()), reverse=True)

    def _list_numbered(self) -> list[Path]:
        paths = self.checkpoints.glob(f"{_PREFIX}*")
        return [path for path in paths if re.fullmatch("[0-9]+", path.name.removeprefix(_PREFIX))]

    def clear_leftovers(self) -> list[str]:
        """Delete what broken writes left behind; warnings that name what is no checkpoint and stays."""
        warnings = []
        for path in sorted(self.checkpoints.glob(f"{_PREFIX}*.partial")):
            self.delete_checkpoint(path)
        for path in sorted(self._list_numbered()):
            if path.is_symlink():
                warnings.append(f"{path}: a symbolic link, not a checkpoint of this run; it is not read")
            elif not path.is_dir():
                warnings.append(
                    f"{path}: a file where a checkpoint's folder goes; it is not read, and deleted when that checkpoint is saved"
                )
        return warnings

    def best_checkpoint(
        self, evaluation_digest: str | None = None, step: int | None = None
    ) -> tuple[Path, float] | None:
        """The checkpoint with the lowest evaluation loss, and that loss. `evaluation_digest`: only if it was evaluated as this digest says; `step`: only
        if it is no later one, whose steps are done again."""
        best = self._read_best()
        if best is None or (evaluation_digest is not None and best[2] != evaluation_digest):
            return None
        return None if step is not None and best[0].name > self.checkpoint_path(step).name else best[:2]

    def drop_stale_best(self, evaluation_digest: str, step: int) -> str:
        """Delete the note of the best where it cannot be compared with evaluations by `evaluation_digest` after `step`; why, or ""."""
        best_path = self.checkpoints / _BEST_FILE
        if not best_path.exists() or self.best_checkpoint(evaluation_digest, step) is not None:
            return ""
        best = self._read_best()
        reason = (
            "its checkpoint is gone, damaged or written again, or its loss is no number"
            if best is None or best[2] == evaluation_digest
            else "the evaluation data, the loss or the collation changed"
        )
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
        """Remember the best. `evaluation_digest`: digest of what it was evaluated with."""
        document = {
            "checkpoint": checkpoint.name,
            "loss": loss,
            "judge": evaluation_digest,
            "manifest": _manifest_digest(checkpoint),
        }
        atomic_write(self.checkpoints / _BEST_FILE, json.dumps(document))

    def last_checked_step(self) -> int:
        """The last step up to which checkpoints are known to be right; 0 where nothing is known."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads((self.path / _CHECKED_FILE).read_text())["step"])
        return 0

    def write_checked_step(self, step: int) -> None:
        """Remember it."""
        atomic_write(self.path / _CHECKED_FILE, json.dumps({"step": step}))

    def newest_checked(self) -> Path | None:
        """The newest checkpoint that is known to be right."""
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
        """Delete all but the last `keep`, the best and the newest that is known to be right, and what broken writes left behind. Never while a checkpoint is written."""
        best, checked = self.best_checkpoint(), self.newest_checked()
        for path in self.list_checkpoints()[self._keep :]:
            if path != checked and (best is None or path != best[0]):
                self.delete_checkpoint(path)
        for path in self.checkpoints.glob(f"{_PREFIX}*"):
            if path.name.endswith(".partial") or (path.is_dir() and not path.is_symlink() and not _is_checkpoint(path)):
                self.delete_checkpoint(path)

    def delete_checkpoint(self, checkpoint: Path) -> None:
        """Delete a checkpoint; of a symbolic link the link alone."""
        with contextlib.suppress(OSError):
            if checkpoint.is_symlink() or not checkpoint.is_dir():
                checkpoint.unlink(missing_ok=True)
                return
            if _is_checkpoint(checkpoint):
                _manifest_path(checkpoint).unlink()  # first, so that a half-deleted checkpoint is none
        shutil.rmtree(checkpoint, ignore_errors=True)


def require_writable(path: Path) -> None:
    """Refuse a folder that cannot be written before anything is measured for it; nothing is made yet."""
    existing_parent = path.absolute()
    while not existing_parent.exists():
        existing_parent = existing_parent.parent
    if not existing_parent.is_dir():
        raise unwritable_error(path, f"{existing_parent} is a file")
    if not os.access(existing_parent, os.W_OK | os.X_OK):
        raise unwritable_error(path, f"{existing_parent} cannot be written")


def unwritable_error(path: Path, cause: OSError | str) -> EchelonError:
    """What is said of a run's folder that cannot be used."""
    reason = cause if isinstance(cause, str) else cause.strerror or str(cause)
    return EchelonError(
        f"{path}: the run's folder cannot be written ({reason}); make it writable, or name another: --out FOLDER (out= in Python)"
    )


def _is_unchanged(path: Path, document: Document) -> bool:
    """Whether the file says just that: what is unchanged keeps its date."""
    try:
        return path.read_text(encoding="utf-8") == document.to_json() + "\n"
    except (OSError, ValueError):
        return False


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def _manifest_path(checkpoint: Path) -> Path:
    # Imports torch, which the process that only starts ranks goes without.
    from echelon.checkpoint_files.checkpoint_reader import MANIFEST_FILE

    return checkpoint / MANIFEST_FILE


def _is_checkpoint(path: Path) -> bool:
    return not path.is_symlink() and _manifest_path(path).is_file()


def _manifest_digest(checkpoint: Path) -> str:
    return hashlib.sha256(_manifest_path(checkpoint).read_bytes()).hexdigest()


def read_record(path: Path) -> JobRecord:
    """What is known of the job that trained in the run folder `path` last."""
    with contextlib.suppress(OSError, ValueError):
        return JobRecord.from_plain(json.loads((path / "job.json").read_text()))
    return JobRecord()


def choose_run_folder(
    folder: str | Path | None, name: str, *, fresh: bool, inputs: Mapping[str, str] | None = None
) -> tuple[Path, str]:
    """The run's folder, and why it is not runs/NAME where that one has another job's run.

    The given folder, or among runs/NAME, runs/NAME-2, ... the first that was made from the same inputs. A fresh run never mixes with an
    old one: it takes the next free name.
    """
    if folder is not None:
        path = Path(folder)
        return (_next_free_name(path) if fresh and path.exists() else path), ""
    path = Path("runs") / "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    if not path.exists() or fresh:
        return (_next_free_name(path) if path.exists() else path), ""
    if inputs is None:
        return path, ""
    reason = ""
    for candidate in _candidate_folders(path):
        recorded_inputs = read_record(candidate).inputs
        input_changes = (
            []
            if recorded_inputs is None or not candidate.exists()
            else describe_differences(recorded_inputs, with_variables(inputs, recorded_inputs))
        )
        if not input_changes:
            return (
                candidate,
                f"{candidate} is the run's folder, because {path} has a run with {reason}" if reason else "",
            )
        reason = reason or "; ".join(input_changes)
    raise AssertionError("there is always a free name")


def _candidate_folders(path: Path) -> Iterator[Path]:
    """runs/NAME, runs/NAME-2, ... up to the first that does not exist; gaps, where a run was deleted, are passed over."""
    yield path
    pattern = re.compile(re.escape(path.name) + r"-(\d+)")
    existing_numbers = [
        int(match[1]) for sibling in path.parent.iterdir() if (match := pattern.fullmatch(sibling.name))
    ]
    for number in sorted(sibling for sibling in existing_numbers if sibling > 1):
        yield path.with_name(f"{path.name}-{number}")
    yield _next_free_name(path)


def _next_free_name(path: Path) -> Path:
    number = 2
    while path.with_name(f"{path.name}-{number}").exists():
        number += 1
    return path.with_name(f"{path.name}-{number}")
