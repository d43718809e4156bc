"""What a launcher and its ranks exchange besides the world: the plan on the way in, a failure on the way out."""

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

#: Path of the launching process's plan, so that ranks do not plan again. Not ECHELON_PLAN: that is the user's setting.
PLAN_VARIABLE = "ECHELON_HANDED_PLAN"
#: Path of the results of calls that a script made before it started ranks, which run it from the top and skip them.
RESULTS_VARIABLE = "ECHELON_DONE"
#: Path where rank 0 leaves the result of the call for which the ranks were started.
RESULT_VARIABLE = "ECHELON_RESULT"
#: Folder in which a rank reports its own failure: the launcher then shows one message instead of N tracebacks.
FAILURES_VARIABLE = "ECHELON_FAILURES"
_STARTED_FILE = "started"
_LOST_CONNECTION_TEXTS = (
    "onnection closed by peer", "onnection reset by peer", "roken pipe", "ncclRemoteError", "pair.cc", "Socket closed",
)  # fmt: skip
#: Numbers the calls of this process.
_result_indices = itertools.count()


def take_plan() -> Path | None:
    """The plan file that the launcher passed to this rank. It is for one training: a script may run several."""
    path = os.environ.pop(PLAN_VARIABLE, None)
    return Path(path) if path is not None else None


def has_plan() -> bool:
    """Whether the launcher passed a plan to this rank that was not taken yet."""
    return PLAN_VARIABLE in os.environ


def take_result_path() -> Path | None:
    """Where the launcher expects the result of this rank's next call; None: it expects none."""
    path = os.environ.pop(RESULT_VARIABLE, None)
    return Path(path) if path is not None else None


def take_previous_result() -> dict[str, str] | None:
    """The result, or error, of this script's next call in the process that started this rank; None: there was no such call."""
    path = os.environ.get(RESULTS_VARIABLE)
    if path is None:
        return None
    results: list[dict[str, str]] = json.loads(Path(path).read_text(encoding="utf-8"))
    index = next(_result_indices)
    return results[index] if index < len(results) else None


def report_start() -> None:
    folder = os.environ.get(FAILURES_VARIABLE)
    if folder is not None:
        with contextlib.suppress(OSError):
            (Path(folder) / _STARTED_FILE).touch()


def has_started(folder: Path) -> bool:
    return (folder / _STARTED_FILE).exists()


def has_launcher() -> bool:
    return FAILURES_VARIABLE in os.environ


def report_failure(error: BaseException, rank: int, *, with_traceback: bool = False) -> bool:
    """Report to the launcher why this rank fails; False: there is none."""
    folder = os.environ.get(FAILURES_VARIABLE)
    if folder is None:
        return False
    # Only another rank's end, seen from here.
    is_lost = isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_CONNECTION_TEXTS)
    report = {
        "rank": rank, "kind": type(error).__name__, "time": time.time(), "is_echelon_error": isinstance(error, EchelonError),
        "is_lost_connection": is_lost, "code": getattr(error, "exit_code", 1),
        "message": format_error(error, with_traceback=with_traceback),
    }  # fmt: skip
    with contextlib.suppress(OSError):
        (Path(folder) / f"failure-{rank}.json").write_text(json.dumps(report))
        return True
    return False


def read_failures(folder: Path) -> list[dict[str, Any]]:
    """The failures that ranks reported, earliest first."""
    reports = []
    for path in folder.glob("failure-*.json"):
        with contextlib.suppress(OSError, ValueError):
            reports.append(json.loads(path.read_text()))
    return sorted(reports, key=lambda report: float(report["time"]))


def format_error(error: BaseException, *, with_traceback: bool = False) -> str:
    """An error for the terminal. One that is not echelon's names the last line of the user's code that led to it."""
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
