"""Ranks as processes of this machine.

Not torchrun's agent, because that imports torch: here the ranks start two seconds earlier, and one rank's own error
reaches the user instead of a table of exit codes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from echelon.errors import LaunchError
from echelon.launchers.environment import child_environment
from echelon.launchers.rank_ipc import FAILURES, has_started, read_words
from echelon.world import STORE, World, usable_cores

#: Seconds that the others get, once a rank has failed, to end by themselves; they may be writing.
GRACE = 5.0
#: Exit code of a rank that was asked to stop and saved.
INTERRUPTED = 130
#: What is said where an interrupt ended a training that could not save: before it began to step, or since it was asked twice.
EARLY = "interrupted before the first step; nothing to save"
AGAIN = "interrupted again and ended at once; the last checkpoint stays"


def launch(
    command: Sequence[str],
    ranks: int,
    *,
    threads: int | None = None,
    environment: Mapping[str, str] | None = None,
    in_turn: bool = False,
) -> int:
    """Run `command` as `ranks` local processes; 0, or 130 when they were interrupted and stopped in order.

    `in_turn`: now and then one of them computes while the others wait, and wants all cores; the products of OpenBLAS take no more threads
    later than they were told at their start.
    Ranks that an interrupt ended before they could stop in order are a KeyboardInterrupt here too.
    """
    folder = Path(tempfile.mkdtemp(prefix="echelon-"))
    most = _threads(1) if in_turn else threads or _threads(ranks)
    base = {**child_environment(most), **(environment or {})}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            world = World(rank=rank, size=ranks, local_rank=rank, local_size=ranks, launched=True)
            output = None if rank == 0 else (folder / f"rank-{rank}.log").open("wb")
            processes.append(
                subprocess.Popen(
                    command,
                    env=_environment(base, world, folder),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=die_with_parent if sys.platform == "linux" else None,
                )
            )
            if output is not None:
                output.close()
        return _wait(processes, folder)
    except OSError as error:
        raise LaunchError(f"rank {len(processes)} of {ranks} could not be started: {error}") from error
    finally:
        _end(processes)
        shutil.rmtree(folder, ignore_errors=True)


def requests() -> tuple[signal.Signals, ...]:
    """Signals that ask a training to stop: Ctrl-C, a batch system, a closed terminal; under nohup that is none."""
    asked = (signal.SIGINT, signal.SIGTERM)
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*asked, signal.SIGHUP)


def _threads(ranks: int) -> int:
    """Of each rank where the plan leaves it open: as the user set it, else an even part of the cores."""
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(told) if told.isdigit() else max(usable_cores() // ranks, 1)


def _environment(base: Mapping[str, str], world: World, folder: Path) -> dict[str, str]:
    return {
        **base,
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        STORE: str(folder / "store"),
        FAILURES: str(folder),
    }


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path) -> int:
    """Until all have ended, or one has failed and the others had their grace. Ctrl-C is passed on, once each time."""
    passed: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        passed.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    # Only the main thread may set handlers; elsewhere (a notebook's worker) the ranks just run.
    before = {}
    for number in requests():
        try:
            before[number] = signal.signal(number, forward)
        except ValueError:
            break
    try:
        failed: int | None = None
        deadline = float("inf")
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if failed is None:
                failed = next(
                    (rank for rank, p in enumerate(processes) if p.poll() not in (None, 0, INTERRUPTED)), None
                )
                deadline = time.monotonic() + GRACE if failed is not None else deadline
            time.sleep(0.02)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    codes = [process.poll() for process in processes]
    if any(code is not None and -code in passed for code in codes):
        raise KeyboardInterrupt(EARLY if len(passed) == 1 else AGAIN)
    if failed is None:
        failed = next((rank for rank, code in enumerate(codes) if code not in (0, INTERRUPTED)), None)
    if failed is not None:
        error = _blame(failed, processes, folder)
        error.started = has_started(folder)
        raise error
    return INTERRUPTED if INTERRUPTED in codes else 0


def _blame(failed: int, processes: list[subprocess.Popen[bytes]], folder: Path) -> LaunchError:
    """The rank that noticed an error of its own first. One that was killed or left cannot tell, so its exit code must; that others
    lost their connection to it is only what follows."""
    told = read_words(folder)
    causes = [word for word in told if not word["follows"]]
    spoke = {word["rank"] for word in told}
    silent = [rank for rank, process in enumerate(processes) if process.returncode and rank not in spoke]
    code = processes[failed].returncode
    if silent and not causes:
        failed = failed if failed in silent else silent[0]
        code = processes[failed].returncode
    elif told and not (code is not None and code < 0):
        first = (causes or told)[0]
        error = LaunchError(first["message"] if first["ours"] else f"rank {first['rank']} failed: {first['message']}")
        error.exit_code, error.kind = int(first["code"]), str(first["kind"])
        return error
    how = (
        f"was killed by signal {signal.Signals(-code).name}"
        if code is not None and code < 0
        else f"ended with exit code {code}"
    )
    if code == -signal.SIGKILL:
        how += " (out of memory?)"
    log = folder / f"rank-{failed}.log"
    tail = log.read_text(errors="replace").strip().splitlines()[-20:] if log.exists() else []
    return LaunchError(
        "\n".join(
            [
                f"rank {failed} of {len(processes)} {how}; the others were ended",
                *(f"[rank {failed}] {line}" for line in tail),
            ]
        )
    )


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """No process outlives the launch."""
    for end in (signal.SIGTERM, signal.SIGKILL):
        alive = [process for process in processes if process.poll() is None]
        for process in alive:
            process.send_signal(end)
        limit = time.monotonic() + 1.0
        while any(process.poll() is None for process in alive) and time.monotonic() < limit:
            time.sleep(0.02)


def die_with_parent() -> None:
    """In the child: be killed when the launcher dies, however it dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
