"""Local ranks: they know the world, the first to fail is blamed in one message, and none outlives the launch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echelon.errors import LaunchError
from echelon.launchers.local import INTERRUPTED_EXIT_CODE, launch


def script(folder: Path, text: str) -> list[str]:
    path = folder / "script.py"
    path.write_text("import os, sys, time, signal\nrank = int(os.environ['RANK'])\n" + text)
    return [sys.executable, str(path)]


def told(folder: Path, names: list[str], *, ranks: int, threads: int | None = None) -> list[str]:
    """What each rank sees in its environment."""
    text = f"open(os.path.join({str(folder)!r}, f'{{rank}}.txt'), 'w').write(' '.join(os.environ[n] for n in {names}))"
    assert launch(script(folder, text), ranks, threads=threads) == 0
    return [(folder / f"{rank}.txt").read_text() for rank in range(ranks)]


def test_every_rank_knows_the_world(tmp_path: Path) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MKL_NUM_THREADS"]
    assert told(tmp_path, names, ranks=3, threads=2) == [f"{rank} 3 {rank} 3 2 2" for rank in range(3)]


def test_ranks_hash_strings_alike_at_every_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of strings have one order: ranks that iterate over them call the same modules."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    text = f"open(os.path.join({str(tmp_path)!r}, f'{{rank}}.txt'), 'w').write(str(hash('alpha')))"
    found = set()
    for _ in range(2):
        assert launch(script(tmp_path, text), 2) == 0
        found |= {(tmp_path / f"{rank}.txt").read_text() for rank in range(2)}
    assert len(found) == 1


@pytest.mark.parametrize("seed", [None, "random"])
def test_ranks_of_other_launchers_hash_strings_alike(tmp_path: Path, seed: str | None) -> None:
    """torchrun, Slurm and MPI leave each rank a random hash seed: it runs its script again with a fixed one."""
    (tmp_path / "script.py").write_text(
        "from echelon.flow.script_calls import prepare_process\nprepare_process('train')\nprint(hash('alpha'))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "PYTHONPATH": str(Path.cwd())}
    environment |= {} if seed is None else {"PYTHONHASHSEED": seed}
    found = set()
    for rank in ("0", "1"):
        ranked = environment | {"RANK": rank, "LOCAL_RANK": rank}
        command = [sys.executable, str(tmp_path / "script.py")]
        found.add(subprocess.run(command, env=ranked, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert len(found) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback's name is Linux's")
def test_local_ranks_talk_on_this_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert told(tmp_path, names, ranks=1) == ["lo eth7"]
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    assert told(tmp_path, names, ranks=1) == ["lo lo"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity is Linux's")
def test_threads_are_a_part_of_the_cores_that_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert told(tmp_path, ["OMP_NUM_THREADS"], ranks=1) == ["3"]
    monkeypatch.delenv("OMP_NUM_THREADS")
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})  # the machine may have more cores than this process
        assert told(tmp_path, ["OMP_NUM_THREADS"], ranks=1) == ["1"]
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.slow
def test_the_rank_that_failed_is_blamed_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"(?s)rank 1 of 3 ended with exit code 7.*\[rank 1\] oh no"):
        launch(script(tmp_path, "if rank == 1: print('oh no'); sys.exit(7)\ntime.sleep(60)"), 3)


@pytest.mark.slow
def test_a_killed_rank_is_blamed_and_the_others_end(tmp_path: Path) -> None:
    text = f"""
open(os.path.join({str(tmp_path)!r}, f'{{rank}}.pid'), 'w').write(str(os.getpid()))
if rank == 2:
    time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    begin = time.monotonic()
    with pytest.raises(LaunchError, match="rank 2 of 3 was killed by signal SIGKILL"):
        launch(script(tmp_path, text), 3)
    assert time.monotonic() - begin < 30
    for rank in range(3):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"{rank}.pid").read_text()), 0)


@pytest.mark.slow
def test_a_rank_tells_its_error_in_one_message(tmp_path: Path) -> None:
    text = """
from echelon.errors import VerificationError
from echelon.launchers.rank_ipc import report_failure
if rank == 1:
    report_failure(VerificationError("it is off by a factor of 2"), rank)
    sys.exit(1)
time.sleep(60)
"""
    with pytest.raises(LaunchError, match=r"^it is off by a factor of 2$") as caught:
        launch(script(tmp_path, text), 2)
    assert caught.value.exit_code == 1


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(LaunchError, match="rank 0 of 2 could not be started"):
        launch(["/no/such/program"], 2)


def test_an_interrupt_reaches_every_rank_once(tmp_path: Path) -> None:
    text = f"""
count = 0
def count_one(*_):
    global count
    count += 1
signal.signal(signal.SIGINT, count_one)
open(os.path.join({str(tmp_path)!r}, f'{{rank}}.ready'), 'w').close()
limit = time.time() + 30
while not count and time.time() < limit: time.sleep(0.01)
time.sleep(0.3)
sys.exit({INTERRUPTED_EXIT_CODE} if count == 1 else 1)
"""
    command = script(tmp_path, text)
    parent = subprocess.Popen(
        [sys.executable, "-c", f"from echelon.launchers.local import launch; raise SystemExit(launch({command!r}, 2))"]
    )
    limit = time.monotonic() + 30
    while len(list(tmp_path.glob("*.ready"))) < 2 and time.monotonic() < limit:
        time.sleep(0.02)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(30) == INTERRUPTED_EXIT_CODE


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_ranks_that_an_interrupt_ended_were_interrupted(tmp_path: Path, number: str) -> None:
    """They had no handler yet: not the fault of any."""
    text = f"""
signal.signal(signal.{number}, signal.SIG_DFL)
open(os.path.join({str(tmp_path)!r}, f'{{rank}}.ready'), 'w').close()
time.sleep(60)
"""
    code = f"""
from echelon.launchers.local import launch
try:
    launch({script(tmp_path, text)!r}, 2)
except KeyboardInterrupt as error:
    print(error)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    limit = time.monotonic() + 30
    while len(list(tmp_path.glob("*.ready"))) < 2 and time.monotonic() < limit:
        time.sleep(0.02)
    parent.send_signal(getattr(signal, number))
    assert parent.communicate(timeout=30)[0] == "interrupted before the first step; nothing to save\n"


def test_a_rank_that_was_killed_by_somebody_else_is_blamed(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="rank 0 of 1 was killed by signal SIGINT"):
        launch(script(tmp_path, "signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGINT)"), 1)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    text = f"open(os.path.join({str(tmp_path)!r}, f'{{rank}}.pid'), 'w').write(str(os.getpid()))\ntime.sleep(60)"
    command = script(tmp_path, text)
    parent = subprocess.Popen(
        [sys.executable, "-c", f"from echelon.launchers.local import launch; launch({command!r}, 2)"]
    )
    limit = time.monotonic() + 30
    while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < limit:
        time.sleep(0.02)
    time.sleep(0.1)
    parent.kill()
    parent.wait()
    time.sleep(0.5)
    for rank in range(2):
        status = Path(f"/proc/{(tmp_path / f'{rank}.pid').read_text()}/status")
        assert not status.exists() or "State:\tZ" in status.read_text()


PREPARE = "from echelon.flow.script_calls import prepare_process; prepare_process('train')"


@pytest.mark.parametrize(("set_to", "kept"), [(None, "-1"), ("10", "10")])
def test_torch_keeps_freed_memory_unless_the_user_says_otherwise(set_to: str | None, kept: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "MIMALLOC_PURGE_DELAY"}
    if set_to is not None:
        environment["MIMALLOC_PURGE_DELAY"] = set_to
    code = f"{PREPARE}; import os; print(os.environ['MIMALLOC_PURGE_DELAY'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == kept


@pytest.mark.slow
def test_a_process_that_has_torch_already_is_left_alone() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "MIMALLOC_PURGE_DELAY"}
    code = f"import torch; {PREPARE}; import os; print(os.environ.get('MIMALLOC_PURGE_DELAY'))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "None"


LOST = "RuntimeError('[pair.cc:553] Connection closed by peer [127.0.0.1]:1')"


@pytest.mark.parametrize(
    ("culprit", "blamed"),
    [
        ("report_failure(ValueError('rank one says no'), 1); sys.exit(1)", "rank 1 failed: .*rank one says no"),
        ("os._exit(9)", "rank 1 of 2 ended with exit code 9"),
    ],
)
def test_a_lost_connection_is_not_the_cause(tmp_path: Path, culprit: str, blamed: str) -> None:
    """Rank 0 tells first that rank 1 is gone; what rank 1 died of counts, told late or not at all."""
    victim = f"report_failure({LOST}, 0); sys.exit(1)"
    text = f"from echelon.launchers.rank_ipc import report_failure\nif rank == 0:\n    {victim}\ntime.sleep(0.5)\n{culprit}\n"
    with pytest.raises(LaunchError, match=blamed):
        launch(script(tmp_path, text), 2)
