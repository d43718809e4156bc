"""What a launcher and its ranks tell each other besides the world: the plan on the way in, a failure on the way out."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError

#: Path of the plan that the launching process made, so that no rank makes it again.
PLAN = "ECHELON_PLAN"
#: Folder where a rank leaves word of its own failure: the launcher then shows one message instead of N tracebacks.
FAILURES = "ECHELON_FAILURES"


def handed_plan() -> Path | None:
    """The plan file that the launcher handed to this rank."""
    return Path(os.environ[PLAN]) if PLAN in os.environ else None


def leave_word(error: BaseException, rank: int) -> bool:
    """Tell the launcher why this rank fails; False where nobody listens."""
    folder = os.environ.get(FAILURES)
    if folder is None:
        return False
    ours = isinstance(error, EchelonError)
    word = {
        "rank": rank,
        "time": time.time(),
        "ours": ours,
        "code": getattr(error, "exit_code", 1),
        "message": str(error) if ours else f"{type(error).__name__}: {error}",
    }
    with contextlib.suppress(OSError):
        (Path(folder) / f"failure-{rank}.json").write_text(json.dumps(word))
        return True
    return False


def read_words(folder: Path) -> list[dict[str, Any]]:
    """What the ranks left, earliest first."""
    words = []
    for path in folder.glob("failure-*.json"):
        with contextlib.suppress(OSError, ValueError):
            words.append(json.loads(path.read_text()))
    return sorted(words, key=lambda word: float(word["time"]))
