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
from echelon.flow.run_settings import JobRecord, with_variables
from echelon.plan.certificate import Certificate
from echelon.plan.cluster import Cluster
from echelon.plan.codec import Document
from echelon.plan.forecast import Forecast
from echelon.plan.input_digests import differences
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile

_PREFIX = "step-"
_BEST, _CHECKED = "best.json", "checked.json"


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
            raise unwritable(self.path, error) from error
        given = {document.KIND: document for document in documents if document is not None}
        for kind in (Plan, Forecast, Profile, Cluster, Certificate):
            path = self.path / f"{kind.KIND}.json"
            if kind.KIND in given:
                if not _holds(path, given[kind.KIND]):
                    given[kind.KIND].save(path)
            else:
                path.unlink(missing_ok=True)

    def certificate(self) -> Certificate | None:
        """The one that lies in the folder."""
        with contextlib.suppress(DocumentError):
            return Certificate.load(self.path / f"{Certificate.KIND}.json")
        return None

    def record(self) -> JobRecord:
        """What is known of the job that trained here last."""
        return read_record(self.path)

    def write_record(self, record: JobRecord) -> None:
        """Remember which job trains here."""
        partial = self.path / "job.json.partial"
        try:
            partial.write_text(json.dumps(dataclasses.asdict(record), indent=1) + "\n")
            partial.replace(self.path / "job.json")
        except OSError as error:
            raise unwritable(self.path, error) from error

    def recall(self, step: int) -> tuple[float | None, dict[str, float] | None]:
        """Loss of the last step, and metrics of the evaluation at `step`, as far as the log has them; None: it has no such evaluation."""
        from echelon.observer import read_events

        with contextlib.suppress(EchelonError, OSError):
            last = {event.kind: event for event in read_events(self.path)}
            loss = last["step"].data.get("loss") if "step" in last else None
            evaluation = last.get("evaluation")
            found = evaluation is not None and evaluation.step == step
            return loss, dict(evaluation.data.get("metrics", {})) if evaluation is not None and found else None
        return None, None

    def place(self, step: int) -> Path:
        """Where the checkpoint of `step` goes."""
        return self.checkpoints / f"{_PREFIX}{step:08d}"

    def saved(self) -> list[Path]:
        """Whole checkpoints, newest first. A symbolic link is none: it may be another run's."""
        return sorted(filter(_is_checkpoint, self._numbered()), reverse=True)

    def _numbered(self) -> list[Path]:
        found = self.checkpoints.glob(f"{_PREFIX}*")
        return [path for path in found if re.fullmatch("[0-9]+", path.name.removeprefix(_PREFIX))]

    def clear_leftovers(self) -> list[str]:
        """Delete what broken writes left behind; warnings that name what is no checkpoint and stays."""
        said = []
        for path in sorted(self.checkpoints.glob(f"{_PREFIX}*.partial")):
            self.discard(path)
        for path in sorted(self._numbered()):
            if path.is_symlink():
                said.append(f"{path}: a symbolic link, not a checkpoint of this run; it is not read")
            elif not path.is_dir():
                said.append(
                    f"{path}: a file where a checkpoint's folder goes; it is not read, and deleted when that checkpoint is saved"
                )
        return said

    def best(self, judge: str | None = None, step: int | None = None) -> tuple[Path, float] | None:
        """The checkpoint with the lowest evaluation loss, and that loss. `judge`: only if it was evaluated as this digest says; `step`: only
        if it is no later one, whose steps are done again."""
        found = self._read_best()
        if found is None or (judge is not None and found[2] != judge):
            return None
        return None if step is not None and found[0].name > self.place(step).name else found[:2]

    def drop_best(self, judge: str, step: int) -> str:
        """Delete the note of the best where it cannot be compared with evaluations by `judge` after `step`; why, or ""."""
        note = self.checkpoints / _BEST
        if not note.exists() or self.best(judge, step) is not None:
            return ""
        found = self._read_best()
        why = (
            "its checkpoint is gone, damaged or written again, or its loss is no number"
            if found is None or found[2] == judge
            else "the evaluation data, the loss or the collation changed"
        )
        with contextlib.suppress(OSError):
            note.unlink()
        return f"{note}: no longer the best, because {why}; the next evaluation is compared with none before it"

    def _read_best(self) -> tuple[Path, float, str] | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads((self.checkpoints / _BEST).read_text())
            path, loss = self.checkpoints / Path(str(note["checkpoint"])).name, float(note["loss"])
            same = _is_checkpoint(path) and note["manifest"] == _digest(path)
            return (path, loss, str(note["judge"])) if same and math.isfinite(loss) else None
        return None

    def note_best(self, checkpoint: Path, loss: float, judge: str) -> None:
        """Remember the best. `judge`: digest of what it was evaluated with."""
        partial = self.checkpoints / f"{_BEST}.partial"
        note = {"checkpoint": checkpoint.name, "loss": loss, "judge": judge, "manifest": _digest(checkpoint)}
        partial.write_text(json.dumps(note))
        partial.replace(self.checkpoints / _BEST)

    def agreed(self) -> int:
        """The last step up to which checkpoints are known to be right; 0 where nothing is known."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads((self.path / _CHECKED).read_text())["step"])
        return 0

    def note_agreed(self, step: int) -> None:
        """Remember it."""
        partial = self.path / f"{_CHECKED}.partial"
        partial.write_text(json.dumps({"step": step}))
        partial.replace(self.path / _CHECKED)

    def newest_checked(self) -> Path | None:
        """The newest checkpoint that is known to be right."""
        agreed = self.agreed()
        return next((path for path in self.saved() if _step_of(path) <= agreed), None)

    def doubt(self, agreed: int) -> list[Path]:
        """Set checkpoints after step `agreed` aside, so that none is resumed from; their new names."""
        found = []
        for path in self.saved():
            if _step_of(path) > agreed:
                aside = path.with_name(f"{path.name}.doubted")
                shutil.rmtree(aside, ignore_errors=True)
                found.append(path.rename(aside))
        return found

    def prune(self) -> None:
        """Delete all but the last `keep`, the best and the newest that is known to be right, and what broken writes left behind. Never while a checkpoint is written."""
        best, checked = self.best(), self.newest_checked()
        for path in self.saved()[self._keep :]:
            if path != checked and (best is None or path != best[0]):
                self.discard(path)
        for path in self.checkpoints.glob(f"{_PREFIX}*"):
            if path.name.endswith(".partial") or (path.is_dir() and not path.is_symlink() and not _is_checkpoint(path)):
                self.discard(path)

    def discard(self, checkpoint: Path) -> None:
        """Delete a checkpoint; of a symbolic link the link alone."""
        with contextlib.suppress(OSError):
            if checkpoint.is_symlink() or not checkpoint.is_dir():
                checkpoint.unlink(missing_ok=True)
                return
            if _is_checkpoint(checkpoint):
                _manifest(checkpoint).unlink()  # first, so that a half-deleted checkpoint is none
        shutil.rmtree(checkpoint, ignore_errors=True)


def require_writable(path: Path) -> None:
    """Refuse a folder that cannot be written before anything is measured for it; nothing is made yet."""
    near = path.absolute()
    while not near.exists():
        near = near.parent
    if not near.is_dir():
        raise unwritable(path, f"{near} is a file")
    if not os.access(near, os.W_OK | os.X_OK):
        raise unwritable(path, f"{near} cannot be written")


def unwritable(path: Path, why: OSError | str) -> EchelonError:
    """What is said of a run's folder that cannot be used."""
    reason = why if isinstance(why, str) else why.strerror or str(why)
    return EchelonError(
        f"{path}: the run's folder cannot be written ({reason}); make it writable, or name another: --out FOLDER (in Python folder=)"
    )


def _holds(path: Path, document: Document) -> bool:
    """Whether the file says just that: what is unchanged keeps its date."""
    try:
        return path.read_text(encoding="utf-8") == document.to_json() + "\n"
    except (OSError, ValueError):
        return False


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def _manifest(checkpoint: Path) -> Path:
    # Imports torch, which the process that only starts ranks goes without.
    from echelon.engine.checkpoint.checkpoint_reader import MANIFEST

    return checkpoint / MANIFEST


def _is_checkpoint(path: Path) -> bool:
    return not path.is_symlink() and _manifest(path).is_file()


def _digest(checkpoint: Path) -> str:
    return hashlib.sha256(_manifest(checkpoint).read_bytes()).hexdigest()


def read_record(path: Path) -> JobRecord:
    """What is known of the job that trained in the run folder `path` last."""
    with contextlib.suppress(OSError, ValueError):
        return JobRecord.read(json.loads((path / "job.json").read_text()))
    return JobRecord()


def choose(
    folder: str | Path | None, name: str, *, fresh: bool, inputs: Mapping[str, str] | None = None
) -> tuple[Path, str]:
    """The run's folder, and why it is not runs/NAME where that one has another job's run.

    The given folder, or among runs/NAME, runs/NAME-2, ... the first that was made from the same inputs. A fresh run never mixes with an
    old one: it takes the next free name.
    """
    if folder is not None:
        path = Path(folder)
        return (_free(path) if fresh and path.exists() else path), ""
    path = Path("runs") / "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    if not path.exists() or fresh:
        return (_free(path) if path.exists() else path), ""
    if inputs is None:
        return path, ""
    why = ""
    for each in _numbered(path):
        before = read_record(each).inputs
        changed = [] if before is None or not each.exists() else differences(before, with_variables(inputs, before))
        if not changed:
            return each, f"{each} is the run's folder, because {path} has a run with {why}" if why else ""
        why = why or "; ".join(changed)
    raise AssertionError("there is always a free name")


def _numbered(path: Path) -> Iterator[Path]:
    """runs/NAME, runs/NAME-2, ... up to the first that does not exist; gaps, where a run was deleted, are passed over."""
    yield path
    pattern = re.compile(re.escape(path.name) + r"-(\d+)")
    there = [int(found[1]) for each in path.parent.iterdir() if (found := pattern.fullmatch(each.name))]
    for number in sorted(each for each in there if each > 1):
        yield path.with_name(f"{path.name}-{number}")
    yield _free(path)


def _free(path: Path) -> Path:
    number = 2
    while path.with_name(f"{path.name}-{number}").exists():
        number += 1
    return path.with_name(f"{path.name}-{number}")
