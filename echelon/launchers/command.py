"""Find the command that the user typed, for messages of ranks that another process started."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

#: The user's command, from the process that starts ranks: nobody typed the ranks' own.
COMMAND_VARIABLE = "ECHELON_COMMAND"
#: Programs installed as scripts: their name is enough, without Python and folder.
_INSTALLED_SCRIPTS = ("echelon", "torchrun")
#: Set by launchers that do not pass the command on (srun, mpirun).
_OTHER_LAUNCHERS = {"RANK", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK"}


def user_command() -> list[str]:
    """The words of the command that led to this process; empty where they are unknown."""
    inherited = os.environ.get(COMMAND_VARIABLE)
    if inherited is not None:
        return [str(word) for word in json.loads(inherited)]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent_command: list[str] = []  # torchrun's agent is the parent of its ranks
        with contextlib.suppress(OSError):
            parent_command = Path(f"/proc/{os.getppid()}/cmdline").read_text().rstrip("\0").split("\0")
        return _without_interpreter(parent_command)
    return [] if _OTHER_LAUNCHERS & set(os.environ) else _without_interpreter(sys.orig_argv)


def command_environment() -> dict[str, str]:
    return {COMMAND_VARIABLE: json.dumps(user_command())}


def _without_interpreter(words: Sequence[str]) -> list[str]:
    name = Path(words[1]).name if len(words) > 1 else ""
    return [name, *words[2:]] if name in _INSTALLED_SCRIPTS else list(words)
