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
PLAN_VARIABLE = "ECHELON_HANDED_PLAN"
#: Path of the results of calls that a script made before it started ranks: ranks, which run it from the top, do not repeat them.
RESULTS_VARIABLE = "ECHELON_DONE"
#: Path where rank 0 leaves the result of the call for which the ranks were started.
RESULT_VARIABLE = "ECHELON_RESULT"
#: Folder where a rank leaves word of its own failure: the launcher then shows one message instead of N tracebacks.
FAILURES_VARIABLE = "ECHELON_FAILURES"
_STARTED_FILE = "started"


def take_plan() -> Path | None:
    """The plan file that the launcher handed to this rank. It is for one training: a script may hold several."""
    path = os.environ.pop(PLAN_VARIABLE, None)
    return Path(path) if path is not None else None


def has_plan() -> bool:
    """Whether the launcher handed a plan to this rank that was not taken yet."""
    return PLAN_VARIABLE in os.environ


#: Calls of the process that started this rank that this rank has come to.
_result_indices = itertools.count()


def take_result_path() -> Path | None:
    """Where the launcher expects the result of the call that comes next on this rank; None: it expects none."""
    path = os.environ.pop(RESULT_VARIABLE, None)
    return Path(path) if path is not None else None


def take_previous_result() -> dict[str, str] | None:
    """What the next call of this script returned in the process that started this rank, or its error; None: that process did not do it."""
    path = os.environ.get(RESULTS_VARIABLE)
    if path is None:
        return None
    results: list[dict[str, str]] = json.loads(Path(path).read_text(encoding="utf-8"))
    index = next(_result_indices)
    return results[index] if index < len(results) else None


def report_start() -> None:
    """Let the launcher know that steps are trained from now on."""
    folder = os.environ.get(FAILURES_VARIABLE)
    if folder is not None:
        with contextlib.suppress(OSError):
            (Path(folder) / _STARTED_FILE).touch()


def has_started(folder: Path) -> bool:
    """Whether a rank that was given this folder trains, or has trained."""
    return (folder / _STARTED_FILE).exists()


def has_launcher() -> bool:
    """Whether a launcher of ours started this rank, and listens."""
    return FAILURES_VARIABLE in os.environ


def report_failure(error: BaseException, rank: int, *, with_traceback: bool = False) -> bool:
    """Tell the launcher why this rank fails, with the traceback if `with_traceback`; False where nobody listens."""
    folder = os.environ.get(FAILURES_VARIABLE)
    if folder is None:
        return False
    report = {
        "rank": rank,
        "kind": type(error).__name__,
        "time": time.time(),
        "is_echelon_error": isinstance(error, EchelonError),
        "is_lost_connection": _is_lost_connection(error),
        "code": getattr(error, "exit_code", 1),
        "message": format_error(error, with_traceback=with_traceback),
    }
    with contextlib.suppress(OSError):
        (Path(folder) / f"failure-{rank}.json").write_text(json.dumps(report))
        return True
    return False


def _is_lost_connection(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone."""
    text = str(error)
    connection_errors = (
        "onnection closed by peer",
        "onnection reset by peer",
        "roken pipe",
        "ncclRemoteError",
        "pair.cc",
        "Socket closed",
    )
    return isinstance(error, RuntimeError) and any(pattern in text for pattern in connection_errors)


def format_error(error: BaseException, *, with_traceback: bool = False) -> str:
    """An error for people. One that is not ours comes with the last line of the user's own that led to it."""
    if with_traceback:
        return "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, EchelonError):
        return str(error)
    return f"{_user_location(error)}{type(error).__name__}: {error}\n(--debug shows the traceback)"


def _user_location(error: BaseException) -> str:
    library_folders = [Path(__file__).resolve().parent.parent, Path(sysconfig.get_paths()["stdlib"]).resolve()]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not path.is_file() or "site-packages" in path.parts:
            continue
        if not any(path.resolve().is_relative_to(folder) for folder in library_folders):
            return f"{frame.filename}, line {frame.lineno}: "
    return ""


def read_failures(folder: Path) -> list[dict[str, Any]]:
    """What the ranks left, earliest first."""
    reports = []
    for path in folder.glob("failure-*.json"):
        with contextlib.suppress(OSError, ValueError):
            reports.append(json.loads(path.read_text()))
    return sorted(reports, key=lambda report: float(report["time"]))
