"""What a launcher and its ranks tell each other besides the world: the plan on the way in, a failure on the way out."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sysconfig
import time
import traceback
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError

#: Path of the plan that the launching process made, so that no rank makes it again. Not ECHELON_PLAN: that is the user's setting.
PLAN = "ECHELON_HANDED_PLAN"
#: Path of what trainings returned that a script did before it started ranks: ranks, which run it from its beginning, do not repeat them.
DONE = "ECHELON_DONE"
#: Folder where a rank leaves word of its own failure: the launcher then shows one message instead of N tracebacks.
FAILURES = "ECHELON_FAILURES"
_STARTED = "started"


def take_plan() -> Path | None:
    """The plan file that the launcher handed to this rank. It is for one training: a script may hold several."""
    path = os.environ.pop(PLAN, None)
    return Path(path) if path is not None else None


def has_plan() -> bool:
    """Whether the launcher handed a plan to this rank that was not taken yet."""
    return PLAN in os.environ


#: Trainings of the process that started this rank that were asked for here.
_taken = itertools.count()


def take_done() -> dict[str, Any] | None:
    """What the next training of this script returned in the process that started this rank, or its error; None: that process did not do it."""
    path = os.environ.get(DONE)
    if path is None:
        return None
    done: list[dict[str, Any]] = json.loads(Path(path).read_text(encoding="utf-8"))
    place = next(_taken)
    return done[place] if place < len(done) else None


def note_start() -> None:
    """Let the launcher know that steps are trained from now on."""
    folder = os.environ.get(FAILURES)
    if folder is not None:
        with contextlib.suppress(OSError):
            (Path(folder) / _STARTED).touch()


def has_started(folder: Path) -> bool:
    """Whether a rank that was given this folder trains, or has trained."""
    return (folder / _STARTED).exists()


def heard() -> bool:
    """Whether a launcher of ours started this rank, and listens."""
    return FAILURES in os.environ


def leave_word(error: BaseException, rank: int, *, trace: bool = False) -> bool:
    """Tell the launcher why this rank fails, with the traceback if `trace`; False where nobody listens."""
    folder = os.environ.get(FAILURES)
    if folder is None:
        return False
    word = {
        "rank": rank,
        "kind": type(error).__name__,
        "time": time.time(),
        "ours": isinstance(error, EchelonError),
        "follows": _follows(error),
        "code": getattr(error, "exit_code", 1),
        "message": in_words(error, trace=trace),
    }
    with contextlib.suppress(OSError):
        (Path(folder) / f"failure-{rank}.json").write_text(json.dumps(word))
        return True
    return False


def _follows(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone."""
    text = str(error)
    lost = (
        "onnection closed by peer",
        "onnection reset by peer",
        "roken pipe",
        "ncclRemoteError",
        "pair.cc",
        "Socket closed",
    )
    return isinstance(error, RuntimeError) and any(words in text for words in lost)


def in_words(error: BaseException, *, trace: bool = False) -> str:
    """An error for people. One that is not ours comes with the last line of the user's own that led to it."""
    if trace:
        return "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, EchelonError):
        return str(error)
    return f"{_where(error)}{type(error).__name__}: {error}\n(--debug shows the traceback)"


def _where(error: BaseException) -> str:
    foreign = [Path(__file__).resolve().parent.parent, Path(sysconfig.get_paths()["stdlib"]).resolve()]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not path.is_file() or "site-packages" in path.parts:
            continue
        if not any(path.resolve().is_relative_to(folder) for folder in foreign):
            return f"{frame.filename}, line {frame.lineno}: "
    return ""


def read_words(folder: Path) -> list[dict[str, Any]]:
    """What the ranks left, earliest first."""
    words = []
    for path in folder.glob("failure-*.json"):
        with contextlib.suppress(OSError, ValueError):
            words.append(json.loads(path.read_text()))
    return sorted(words, key=lambda word: float(word["time"]))
