"""Start ranks as processes of this machine.

Not torchrun's agent, because that imports torch: here ranks start two seconds earlier, and one rank's own error
reaches the user instead of a table of exit codes.
"""

from __future__ import annotations

import ctypes
import math
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
from echelon.launchers.rank_ipc import FAILURES_VARIABLE, has_started, read_failures
from echelon.world import STORE_VARIABLE, World, usable_cores

#: Seconds that the other ranks get to end by themselves once one has failed; they may be writing.
GRACE_SECONDS = 5.0
#: Exit code of a rank that was interrupted and saved.
INTERRUPTED_EXIT_CODE = 130
#: Shown where an interrupt ended a training that could not save: before its first step, or when interrupted twice.
EARLY_INTERRUPT_MESSAGE = "interrupted before the first step; nothing to save"
SECOND_INTERRUPT_MESSAGE = "interrupted again and ended at once; the last checkpoint stays"

_Process = subprocess.Popen[bytes]


def launch(
    command: Sequence[str], ranks: int, *, threads: int | None = None, environment: Mapping[str, str] | None = None,
    one_at_a_time: bool = False,
) -> int:  # fmt: skip
    """Run `command` as `ranks` local processes. Returns 0, or 130 when they were interrupted and stopped in order.

    `one_at_a_time`: at times one rank computes alone and needs all cores; OpenBLAS cannot use more threads later than at
    its start. Ranks that an interrupt ended before they could stop in order raise KeyboardInterrupt here too.
    """
    folder = Path(tempfile.mkdtemp(prefix="echelon-"))
    thread_count = _default_threads(1) if one_at_a_time else threads or _default_threads(ranks)
    base_environment = child_environment(thread_count) | dict(environment or {})
    processes: list[_Process] = []
    try:
        for rank in range(ranks):
            world = World(rank=rank, size=ranks, local_rank=rank, local_size=ranks, launched=True)
            processes.append(_start_rank(command, base_environment, world, folder))
        return _wait_for_ranks(processes, folder)
    except OSError as error:
        raise LaunchError(f"rank {len(processes)} of {ranks} could not be started: {error}") from error
    finally:
        _end_processes(processes)
        shutil.rmtree(folder, ignore_errors=True)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that ask a training to stop: Ctrl-C, a batch system, a closed terminal (not under nohup)."""
    signals = (signal.SIGINT, signal.SIGTERM)
    return signals if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*signals, signal.SIGHUP)


def die_with_parent() -> None:
    """In a child process: be killed when the launcher dies, however it dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _default_threads(ranks: int) -> int:
    """Threads of each rank where the plan leaves them open: as the user set them, else an even part of the cores."""
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(setting) if setting.isdigit() else max(usable_cores() // ranks, 1)


def _start_rank(command: Sequence[str], environment: Mapping[str, str], world: World, folder: Path) -> _Process:
    """Start one rank. Rank 0 prints to the terminal, the others to a file in `folder`."""
    variables = {
        "RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": world.local_rank, "LOCAL_WORLD_SIZE": world.local_size,
        STORE_VARIABLE: folder / "store", FAILURES_VARIABLE: folder,
    }  # fmt: skip
    output = None if world.is_main else (folder / f"rank-{world.rank}.log").open("wb")
    try:
        return subprocess.Popen(
            command, env={**environment, **{name: str(value) for name, value in variables.items()}},
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )  # fmt: skip
    finally:
        if output is not None:
            output.close()


def _wait_for_ranks(processes: list[_Process], folder: Path) -> int:
    """Wait until all have ended, or one has failed and the others had their grace. Interrupts are forwarded, once each."""
    forwarded: list[int] = []

    def forward(signal_number: int, _: FrameType | None) -> None:
        forwarded.append(signal_number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal_number)

    # Only the main thread may set handlers; elsewhere (a notebook's worker) the ranks just run.
    previous_handlers = {}
    for signal_number in stop_signals():
        try:
            previous_handlers[signal_number] = signal.signal(signal_number, forward)
        except ValueError:
            break
    try:
        failed_rank: int | None = None
        deadline = math.inf
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if failed_rank is None and (failed_rank := _first_failed(processes)) is not None:
                deadline = time.monotonic() + GRACE_SECONDS
            time.sleep(0.02)
    finally:
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, handler)
    codes = [process.poll() for process in processes]
    if any(code is not None and -code in forwarded for code in codes):
        raise KeyboardInterrupt(EARLY_INTERRUPT_MESSAGE if len(forwarded) == 1 else SECOND_INTERRUPT_MESSAGE)
    failed_rank = _first_failed(processes) if failed_rank is None else failed_rank
    if failed_rank is not None:
        error = _launch_error(failed_rank, processes, folder)
        error.started = has_started(folder)
        raise error
    return INTERRUPTED_EXIT_CODE if INTERRUPTED_EXIT_CODE in codes else 0


def _first_failed(processes: list[_Process]) -> int | None:
    codes = [process.poll() for process in processes]
    return next((rank for rank, code in enumerate(codes) if code not in (None, 0, INTERRUPTED_EXIT_CODE)), None)


def _launch_error(failed_rank: int, processes: list[_Process], folder: Path) -> LaunchError:
    """Blame the rank that reported an error of its own first. One that was killed cannot report, so its exit code must;
    lost connections to it are only consequences."""
    reports = read_failures(folder)
    own_failures = [report for report in reports if not report["is_lost_connection"]]
    reporting_ranks = {report["rank"] for report in reports}
    silent = [rank for rank, process in enumerate(processes) if process.returncode and rank not in reporting_ranks]
    if silent and not own_failures:
        failed_rank = failed_rank if failed_rank in silent else silent[0]
    elif reports and (processes[failed_rank].returncode or 0) >= 0:
        first = (own_failures or reports)[0]
        prefix = "" if first["is_echelon_error"] else f"rank {first['rank']} failed: "
        error = LaunchError(f"{prefix}{first['message']}")
        error.exit_code, error.error_class = int(first["code"]), str(first["kind"])
        return error
    code = processes[failed_rank].returncode
    ending = f"ended with exit code {code}"
    if code is not None and code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        ending = f"was killed by signal {signal.Signals(-code).name}{hint}"
    log = folder / f"rank-{failed_rank}.log"
    tail = log.read_text(errors="replace").strip().splitlines()[-20:] if log.exists() else []
    summary = f"rank {failed_rank} of {len(processes)} {ending}; the others were ended"
    return LaunchError("\n".join([summary, *(f"[rank {failed_rank}] {line}" for line in tail)]))


def _end_processes(processes: list[_Process]) -> None:
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        alive = [process for process in processes if process.poll() is None]
        for process in alive:
            process.send_signal(signal_number)
        deadline = time.monotonic() + 1.0
        while any(process.poll() is None for process in alive) and time.monotonic() < deadline:
            time.sleep(0.02)
