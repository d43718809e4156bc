"""Train a job with echelon, as users do (`echelon train`), or in rank processes that are reused (`--fast`)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from echelon.errors import EchelonError
from echelon.testing.rank_pool import RankError, RankPool

ROOT = Path(__file__).resolve().parents[2]

#: The job file that users would write: `spec` is all that differs between jobs.
_JOB_FILE = """import echelon
from bench.adversary.spec import load


def job():
    return echelon.Job(**load({name!r}).job_fields())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a training ended."""

    #: Exit code; None: it did not end in time and was killed.
    code: int | None
    output: str
    folder: Path
    seconds: float
    #: Raw exception that left a rank (--fast only).
    raised: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)

    def last(self, kind: str) -> dict[str, Any]:
        """The newest event of a kind."""
        return next((each for each in reversed(self.events) if each["kind"] == kind), {})

    @property
    def losses(self) -> list[float]:
        """The loss of each step; of a step that was run twice, the last."""
        found = {each["step"]: float(each["loss"]) for each in self.events if each["kind"] == "step"}
        return [found[step] for step in sorted(found)]


class Command:
    """`echelon train` in a process of its own, with default settings."""

    name = "cli"

    def __init__(self, work: Path, *, timeout: float, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: variables on top of those that it inherits."""
        self._work, self._timeout, self._environment = work, timeout, dict(environment or {})

    def train(self, job: str, plan: str, folder: Path, *, every: int | None = None) -> Outcome:
        """Train `job` in `folder`, or go on with what is there."""
        file = write_job(self._work, job)
        command = [sys.executable, "-m", "echelon", "train", str(file), "--out", str(folder)]
        command += [] if plan == "auto" else ["--plan", plan]
        command += [] if every is None else ["--every", str(every), "--keep", "99"]
        began = time.monotonic()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{folder.name}.log").open("w+") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=file.parent,
                env=environment(self._work) | self._environment,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(self._timeout)
            except subprocess.TimeoutExpired:
                code = None
                kill_tree(process.pid)
                process.wait()
            log.seek(0)
            output = log.read()
        return Outcome(
            code=code, output=output, folder=folder, seconds=time.monotonic() - began, events=read_events(folder)
        )

    def close(self) -> None:
        """Nothing is kept between trainings."""


class Reused:
    """Rank processes of `echelon.testing.Pool`, each calling `echelon.train` once per training."""

    name = "fast"

    def __init__(self, work: Path, *, timeout: float, pool: RankPool | None = None) -> None:
        self._work, self._timeout, self._owned = work, timeout, pool is None
        self._command = Command(work, timeout=timeout)
        if pool is None:
            os.environ.update({key: environment(work)[key] for key in ("ECHELON_CACHE", "HF_HUB_OFFLINE")})
        self._pool = pool or RankPool()

    def train(self, job: str, plan: str, folder: Path, *, every: int | None = None) -> Outcome:
        """The same as `Command.train`; `auto`, which decides the number of ranks, goes through the command line."""
        if plan == "auto":
            return self._command.train(job, plan, folder, every=every)
        file, began, code, raised, said = write_job(self._work, job), time.monotonic(), 0, "", ""
        options = {"out": str(folder), "quiet": True} | ({} if every is None else {"every": every, "keep": 99})
        try:
            self._pool.run(
                ranks_of(plan), train_in_rank, str(file), plan, options, timeout=self._timeout, init_process_group=False
            )
        except RankError as error:
            code = None if "did not finish within" in str(error) else 1
            expected = isinstance(error.error, EchelonError)
            raised, said = ("" if expected else str(error)), f"error: {error.error}"
        printed = "\n".join(self._pool.outputs)
        events = read_events(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        (folder.parent / f"{folder.name}.log").write_text("\n".join([printed, said]))
        warned = "\n".join(str(each.get("message", "")) for each in events if each["kind"] == "warning")
        return Outcome(
            code=code,
            output="\n".join(filter(None, (printed, warned, said))),
            folder=folder,
            seconds=time.monotonic() - began,
            raised=raised,
            events=events,
        )

    def close(self) -> None:
        """End the ranks, if they are its own."""
        if self._owned:
            self._pool.close()


def train_in_rank(world: Any, file: str, plan: str, options: Mapping[str, Any]) -> None:
    """One rank of a training."""
    from echelon.flow.train import train

    sys.path.insert(0, str(ROOT))
    os.chdir(Path(file).parent)
    train(file, plan, **options)


def write_job(work: Path, job: str) -> Path:
    """The job file of `job`, in a folder of its own."""
    file = work / "jobs" / job / "job.py"
    text = _JOB_FILE.format(name=job)
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return file


def environment(work: Path) -> dict[str, str]:
    """What the command line inherits: our paths, a cache of its own, nothing of an outer world of ranks."""
    outer = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {key: value for key, value in os.environ.items() if key not in outer and not key.startswith("ECHELON_")}
    return kept | {
        "PYTHONPATH": str(ROOT),
        "ECHELON_CACHE": os.environ.get("ADVERSARY_CACHE", str(work / "cache")),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
    }


def ranks_of(plan: str) -> int:
    """How many ranks a short form asks for."""
    count = 1
    for _, number in re.findall(r"\b(dp|tp|pp)=(\d+)", plan):
        count *= int(number)
    return count


def rewind(folder: Path, step: int) -> int:
    """Delete the checkpoints after `step`, as if the run had been killed then; the step that is left to resume from."""
    kept = 0
    for place in sorted((folder / "checkpoints").glob("step-*")):
        number = int(place.name.removeprefix("step-").partition(".")[0])
        if number > step:
            shutil.rmtree(place)
        else:
            kept = max(kept, number)
    return kept


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The run's event log, oldest first, without echelon's own reader."""
    found = []
    path = folder / "events.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def kill_tree(pid: int) -> None:
    """Kill a process and everything that it started."""
    try:
        family = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return
    for each in family:
        try:
            each.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
