"""The command that a person gave, as ranks of any launcher know it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHOW = "import json\nfrom echelon.launchers.command import user_command\nprint(json.dumps(user_command()))\n"


def told(folder: Path, *command: str, **environment: str) -> list[str]:
    """What `python COMMAND` takes for its command; show.py is in the folder."""
    (folder / "show.py").write_text(SHOW)
    values = {**os.environ, "PYTHONPATH": str(Path.cwd()), **environment}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=values, capture_output=True, text=True, check=True, timeout=120
    )
    return [str(word) for word in json.loads(done.stdout)]


def test_a_script_is_its_own_command(tmp_path: Path) -> None:
    assert told(tmp_path, "show.py", "a b") == [sys.executable, "show.py", "a b"]


def test_what_is_installed_goes_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "echelon").write_text(SHOW)
    assert told(tmp_path, "./echelon", "train", "x.py") == ["echelon", "train", "x.py"]


def test_ranks_of_ours_are_told(tmp_path: Path) -> None:
    assert told(tmp_path, "show.py", RANK="0", ECHELON_COMMAND='["python", "mine.py"]') == ["python", "mine.py"]


def test_what_srun_was_given_is_not_known(tmp_path: Path) -> None:
    assert told(tmp_path, "show.py", SLURM_STEP_ID="0") == []


@pytest.mark.slow
def test_ranks_of_torchrun_know_torchrun(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "show.py", "a b")
    assert told(tmp_path, *torchrun) == [sys.executable, *torchrun]
