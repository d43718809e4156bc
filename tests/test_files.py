"""Atomic writes and file locks, against real files and processes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from echelon.errors import FileLockError
from echelon.files import (
    acquire_lock,
    atomic_write,
    atomic_writer,
    describe_holders,
    release_lock,
    sync_folder,
    try_lock,
)


def test_text_and_bytes_replace_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    atomic_write(path, "größer")
    assert path.read_text(encoding="utf-8") == "größer"
    atomic_write(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    atomic_write(path, "old")
    writer = atomic_writer(path)
    writer.__enter__().write(b"half")
    assert not writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_what_was_written_can_be_read_before_it_appears(tmp_path: Path) -> None:
    with atomic_writer(tmp_path / "a") as file:
        file.write(b"content")
        file.seek(0)
        assert file.read() == b"content"
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").read_bytes() == b"content"


def test_bytes_are_on_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def record_fsync(descriptor: int) -> None:
        calls.append(
            "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else f"{os.fstat(descriptor).st_size} bytes"
        )
        fsync(descriptor)

    def record_replace(self: Path, target: Path) -> Path:
        calls.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record_replace)
    atomic_write(tmp_path / "a", "12345")
    assert calls == ["5 bytes", "replace", "folder"]


def test_concurrent_writers_never_mix(tmp_path: Path) -> None:
    path, texts = tmp_path / "a", [str(number) * 100_000 for number in range(8)]
    atomic_write(path, texts[0])
    with ThreadPoolExecutor(8) as pool:
        writes = [pool.submit(atomic_write, path, text) for text in texts * 5]
        while not all(write.done() for write in writes):
            assert path.read_text() in texts
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert not any(write.exception() for write in writes)


@pytest.mark.parametrize(("code", "is_harmless"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_file_system_that_cannot_sync_folders_is_no_error(
    code: int, is_harmless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    if is_harmless:
        sync_folder(tmp_path)
    else:
        with pytest.raises(OSError, match=os.strerror(code)):
            sync_folder(tmp_path)


_HOLD = """
import sys
from pathlib import Path
from echelon.files import acquire_lock
with acquire_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def _hold_elsewhere(path: Path) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    return holder


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with _hold_elsewhere(path) as holder:
        with pytest.raises(
            TimeoutError, match=rf"^{path} is locked by process {holder.pid} on {socket.gethostname()}$"
        ):
            acquire_lock(path)
        assert json.loads(path.read_text()) == {"pid": holder.pid, "host": socket.gethostname()}
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with acquire_lock(path):
            assert describe_holders(path) == f"process {os.getpid()} on {socket.gethostname()}"
    with acquire_lock(path):  # released above
        pass


def test_a_holder_on_another_machine_is_named_by_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text('{"pid": 12, "host": "far"}')
    assert describe_holders(path) == "process 12 on far"
    path.write_text("{")
    assert describe_holders(path) == describe_holders(tmp_path / "none") == "another process"


def test_waiting_ends_timeout_seconds_after_the_last_heartbeat(tmp_path: Path) -> None:
    path, beats = tmp_path / "lock", iter([0, 1, 2, 3])
    with acquire_lock(path):
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            acquire_lock(path, timeout=0.2, heartbeat=lambda: time.sleep(0.1) or next(beats, None))  # type: ignore[func-returns-value]
        assert time.monotonic() - start > 0.5


def test_a_lock_file_deleted_while_another_waits_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = acquire_lock(path)
    locked = threading.Event()

    def wait() -> Any:
        lock = acquire_lock(path, timeout=5)
        locked.set()
        return lock

    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(wait)
        time.sleep(0.05)
        path.unlink()
        assert locked.wait(5)
        with first, path.open() as again:
            assert not try_lock(again.fileno())
        with waiting.result():
            pass


def test_shared_locks_exclude_only_exclusive_ones(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second, third = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(3))
    assert try_lock(first, shared=True)
    assert try_lock(second, shared=True)
    assert not try_lock(third)
    with pytest.raises(TimeoutError):
        acquire_lock(path)
    release_lock(first)
    release_lock(second)
    assert try_lock(third)
    release_lock(third)


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    path = tmp_path / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", fail)
        for lock in (lambda: acquire_lock(path), lambda: try_lock(descriptor, shared=True)):
            with pytest.raises(
                FileLockError, match=rf"^{path} cannot be locked: No locks available; .* another folder"
            ):
                lock()
        release_lock(descriptor)
