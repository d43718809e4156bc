"""The loops are compiled once, that is waited for, and a worker has its own before it is counted."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from echelon.errors import LaunchError
from echelon.server import Servers, kernels
from echelon.server.jit_warmup import _warmup_lock, warm_up_client
from echelon.server.kernels.jit_cache import cache_folder
from echelon.server.local_servers import ChildProcess


def _copy(folder: Path, text: str) -> Any:
    folder.mkdir()
    (folder / "loops.py").write_text(text)
    spec = importlib.util.spec_from_file_location("loops", folder / "loops.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.one


def test_checkouts_of_one_user_share_what_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = "from echelon.server.kernels.jit_cache import cached_njit\n@cached_njit()\ndef one():\n    return 1\n"
    first, same = _copy(tmp_path / "a", text), _copy(tmp_path / "b", text)
    assert cache_folder(first) == cache_folder(same)
    assert cache_folder(first) != cache_folder(_copy(tmp_path / "c", text.replace("return 1", "return 2")))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["XDG_CACHE_HOME", "NUMBA_CACHE_DIR"])
def test_what_is_compiled_is_renewed_by_a_change_beside_it(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that another file's calls is compiled into it."""
    monkeypatch.setenv(where, str(tmp_path / "cache"))
    front = "from echelon.server.kernels.jit_cache import cached_njit\n"
    called = front + "@cached_njit(forceinline=True)\ndef called():\n    return 1\n"
    text = front + "from called import called\n@cached_njit()\ndef one():\n    return called()\n"
    seen = []
    for value in (1, 2):
        folder = tmp_path / "same"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "called.py").write_text(called.replace("return 1", f"return {value}"))
        (folder / "one.py").write_text(text)
        os.utime(folder / "one.py", (0, 0))
        script = "import sys; sys.path.insert(0, sys.argv[1]); import one; print(one.one())"
        run = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
        seen.append(run.stdout.strip())
    assert seen == ["1", "2"]


def test_who_waits_for_the_compiling_process_hears_that_it_lives(tmp_path: Path) -> None:
    heard: list[float] = []
    known = threading.Event()

    def wait() -> None:
        with _warmup_lock(tmp_path, lambda share: (heard.append(share), known.set())[0]) as told:  # type: ignore[func-returns-value]
            assert told is None

    waiter = threading.Thread(target=wait)
    with _warmup_lock(tmp_path, lambda share: None) as told:
        assert told is not None
        waiter.start()
        told(0.5)
        assert known.wait(20)
    waiter.join(20)
    assert heard == [0.5]


def test_a_worker_has_its_loops_before_it_joins() -> None:
    warm_up_client()
    kinds = {signature[0].dtype.name for signature in kernels.segment_sum.signatures}
    assert kinds >= {"float32", "float64"}


@pytest.mark.slow
def test_compiling_is_no_silence_and_what_lacks_is_told_in_words(tmp_path: Path) -> None:
    signs = 10
    with Servers(1, replicas=1, shards=4, folder=tmp_path) as servers:
        # One that never joins: nobody listens where it looks for the controller.
        lost = {"role": "server", "secret": servers.secret.hex(), "controller": "127.0.0.1:9", "name": "lost"}
        servers.servers["lost"] = ChildProcess(lost, tmp_path / "lost.log")

        def compile_slowly() -> None:
            nonlocal signs
            while signs:
                with open(tmp_path / "lost.log", "a") as log:
                    log.write(json.dumps({"event": "compiling", "share": 0.5}) + "\n")
                signs -= 1
                time.sleep(0.1)

        thread = threading.Thread(target=compile_slowly)
        thread.start()
        with pytest.raises(LaunchError, match="lost of 2 did not join the controller") as told:
            servers.wait_until_ready(timeout=0.5)
        assert signs == 0
        thread.join()
    assert "unplaced" not in str(told.value)
