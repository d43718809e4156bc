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
from echelon.launchers.rank_ipc import FAILURES_VARIABLE, has_started, read_failures
from echelon.world import STORE_VARIABLE, World, usable_cores

#: Seconds that the others get, once a rank has failed, to end by themselves; they may be writing.
GRACE_SECONDS = 5.0
#: Exit code of a rank that was asked to stop and saved.
INTERRUPTED_EXIT_CODE = 130
#: What is said where an interrupt ended a training that could not save: before it began to step, or since it was asked twice.
EARLY_INTERRUPT_MESSAGE = "interrupted before the first step; nothing to save"
SECOND_INTERRUPT_MESSAGE = "interrupted again and ended at once; the last checkpoint stays"


def launch(
    command: Sequence[str],
    ranks: int,
    *,
    threads: int | None = None,
    environment: Mapping[str, str] | None = None,
    one_at_a_time: bool = False,
) -> int:
    """Run `command` as `ranks` local processes; 0, or 130 when they were interrupted and stopped in order.

    `one_at_a_time`: now and then one of them computes while the others wait, and wants all cores; the products of OpenBLAS take no more threads
    later than they were told at their start.
    Ranks that an interrupt ended before they could stop in order are a KeyboardInterrupt here too.
    """
    folder = Path(tempfile.mkdtemp(prefix="echelon-"))
    thread_count = _default_threads(1) if one_at_a_time else threads or _default_threads(ranks)
    base_environment = {**child_environment(thread_count), **(environment or {})}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            world = World(rank=rank, size=ranks, local_rank=rank, local_size=ranks, launched=True)
            output = None if rank == 0 else (folder / f"rank-{rank}.log").open("wb")
            processes.append(
                subprocess.Popen(
                    command,
                    env=_rank_environment(base_environment, world, folder),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=die_with_parent if sys.platform == "linux" else None,
                )
            )
            if output is not None:
                output.close()
        return _wait_for_ranks(processes, folder)
    except OSError as error:
        raise LaunchError(f"rank {len(processes)} of {ranks} could not be started: {error}") from error
    finally:
        _end_processes(processes)
        shutil.rmtree(folder, ignore_errors=True)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that ask a training to stop: Ctrl-C, a batch system, a closed terminal; under nohup that is none."""
    signals = (signal.SIGINT, signal.SIGTERM)
    return signals if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*signals, signal.SIGHUP)


def _default_threads(ranks: int) -> int:
    """Of each rank where the plan leaves it open: as the user set it, else an even part of the cores."""
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(setting) if setting.isdigit() else max(usable_cores() // ranks, 1)


def _rank_environment(base_environment: Mapping[str, str], world: World, folder: Path) -> dict[str, str]:
    return {
        **base_environment,
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        STORE_VARIABLE: str(folder / "store"),
        FAILURES_VARIABLE: str(folder),
    }


def _wait_for_ranks(processes: list[subprocess.Popen[bytes]], folder: Path) -> int:
    """Until all have ended, or one has failed and the others had their grace. Ctrl-C is passed on, once each time."""
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
        deadline = float("inf")
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if failed_rank is None:
                failed_rank = next(
                    (rank for rank, p in enumerate(processes) if p.poll() not in (None, 0, INTERRUPTED_EXIT_CODE)), None
                )
                deadline = time.monotonic() + GRACE_SECONDS if failed_rank is not None else deadline
            time.sleep(0.02)
    finally:
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, handler)
    codes = [process.poll() for process in processes]
    if any(code is not None and -code in forwarded for code in codes):
        raise KeyboardInterrupt(EARLY_INTERRUPT_MESSAGE if len(forwarded) == 1 else SECOND_INTERRUPT_MESSAGE)
    if failed_rank is None:
        failed_rank = next((rank for rank, code in enumerate(codes) if code not in (0, INTERRUPTED_EXIT_CODE)), None)
    if failed_rank is not None:
        error = _failure_of_ranks(failed_rank, processes, folder)
        error.started = has_started(folder)
        raise error
    return INTERRUPTED_EXIT_CODE if INTERRUPTED_EXIT_CODE in codes else 0


def _failure_of_ranks(failed_rank: int, processes: list[subprocess.Popen[bytes]], folder: Path) -> LaunchError:
    """The rank that noticed an error of its own first. One that was killed or left cannot tell, so its exit code must; that others
    lost their connection to it is only what follows."""
    reports = read_failures(folder)
    original_reports = [report for report in reports if not report["is_lost_connection"]]
    reporting_ranks = {report["rank"] for report in reports}
    silent_ranks = [
        rank for rank, process in enumerate(processes) if process.returncode and rank not in reporting_ranks
    ]
    code = processes[failed_rank].returncode
    if silent_ranks and not original_reports:
        failed_rank = failed_rank if failed_rank in silent_ranks else silent_ranks[0]
        code = processes[failed_rank].returncode
    elif reports and not (code is not None and code < 0):
        first = (original_reports or reports)[0]
        error = LaunchError(
            first["message"] if first["is_echelon_error"] else f"rank {first['rank']} failed: {first['message']}"
        )
        error.exit_code, error.error_class = int(first["code"]), str(first["kind"])
        return error
    ending = (
        f"was killed by signal {signal.Signals(-code).name}"
        if code is not None and code < 0
        else f"ended with exit code {code}"
    )
    if code == -signal.SIGKILL:
        ending += " (out of memory?)"
    log = folder / f"rank-{failed_rank}.log"
    tail = log.read_text(errors="replace").strip().splitlines()[-20:] if log.exists() else []
    return LaunchError(
        "\n".join(
            [
                f"rank {failed_rank} of {len(processes)} {ending}; the others were ended",
                *(f"[rank {failed_rank}] {line}" for line in tail),
            ]
        )
    )


def _end_processes(processes: list[subprocess.Popen[bytes]]) -> None:
    """No process outlives the launch."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        alive = [process for process in processes if process.poll() is None]
        for process in alive:
            process.send_signal(signal_number)
        deadline = time.monotonic() + 1.0
        while any(process.poll() is None for process in alive) and time.monotonic() < deadline:
            time.sleep(0.02)


def die_with_parent() -> None:
    """In the child: be killed when the launcher dies, however it dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
