"""The folder of one run, and which of its checkpoints are kept.

runs/digits/
    plan.json forecast.json profile.json cluster.json
    events.jsonl tensorboard/ report.html
    checkpoints/step-00000120/ ...  best.json
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

_PREFIX = "step-"


class RunFolder:
    """A run's files. Only rank 0 writes here, except for checkpoints."""

    def __init__(self, path: Path, *, keep: int) -> None:
        self.path, self._keep = path, keep
        self.checkpoints = path / "checkpoints"

    def place(self, step: int) -> Path:
        """Where the checkpoint of `step` goes."""
        return self.checkpoints / f"{_PREFIX}{step:08d}"

    def saved(self) -> list[Path]:
        """Whole checkpoints, newest first."""
        found = [path for path in self.checkpoints.glob(f"{_PREFIX}*") if _manifest(path).is_file()]
        return sorted((path for path in found if path.name.removeprefix(_PREFIX).isdigit()), reverse=True)

    def best(self) -> tuple[Path, float] | None:
        """The checkpoint with the lowest evaluation loss, and that loss."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads((self.path / "checkpoints" / "best.json").read_text())
            return self.checkpoints / Path(str(note["checkpoint"])).name, float(note["loss"])
        return None

    def note_best(self, checkpoint: Path, loss: float) -> None:
        """Remember the best."""
        partial = self.checkpoints / "best.json.partial"
        partial.write_text(json.dumps({"checkpoint": checkpoint.name, "loss": loss}))
        partial.replace(self.checkpoints / "best.json")

    def prune(self) -> None:
        """Delete all but the last `keep` and the best, and what broken writes left behind."""
        best = self.best()
        for path in self.saved()[self._keep :]:
            if best is None or path != best[0]:
                _manifest(path).unlink()  # first, so that a half-deleted checkpoint is none
                shutil.rmtree(path, ignore_errors=True)
        for path in self.checkpoints.glob(f"{_PREFIX}*"):
            if path.is_dir() and not path.name.endswith(".partial") and not _manifest(path).is_file():
                shutil.rmtree(path, ignore_errors=True)


def _manifest(checkpoint: Path) -> Path:
    # Imports torch, which the process that only starts ranks goes without.
    from echelon.engine.checkpoint import MANIFEST

    return checkpoint / MANIFEST


def choose(folder: str | Path | None, name: str, *, fresh: bool) -> Path:
    """The run's folder: the given one or runs/NAME; a fresh run never mixes with an old one, it takes the next free name."""
    path = (
        Path(folder)
        if folder is not None
        else Path("runs") / "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    )
    if not fresh or not path.exists():
        return path
    number = 2
    while path.with_name(f"{path.name}-{number}").exists():
        number += 1
    return path.with_name(f"{path.name}-{number}")
