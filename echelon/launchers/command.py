"""The command that a person gave, so that it can be told again: by a rank, which was started by another."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

#: The user's own words, from the process that starts ranks; the ranks' are not what anybody typed.
COMMAND_VARIABLE = "ECHELON_COMMAND"
#: What torchrun gives every process that it starts.
_TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
#: Programs that are installed as scripts: their name says it all, their Python and their folder do not matter.
_INSTALLED_SCRIPTS = ("echelon", "torchrun")


def user_command() -> list[str]:
    """The words of the command that led to this process; empty where they are not known (srun, mpirun)."""
    inherited = os.environ.get(COMMAND_VARIABLE)
    if inherited is not None:
        return [str(word) for word in json.loads(inherited)]
    if _TORCHRUN_VARIABLE in os.environ:
        return _without_interpreter(_parent_command())
    return (
        []
        if {"RANK", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK"} & set(os.environ)
        else _without_interpreter(sys.orig_argv)
    )


def command_environment() -> dict[str, str]:
    """What a rank needs in its environment to know the command."""
    return {COMMAND_VARIABLE: json.dumps(user_command())}


def _without_interpreter(words: Sequence[str]) -> list[str]:
    name = Path(words[1]).name if len(words) > 1 else ""
    return [name, *words[2:]] if name in _INSTALLED_SCRIPTS else list(words)


def _parent_command() -> list[str]:
    """torchrun's agent is the parent of its ranks."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{os.getppid()}/cmdline").read_text().rstrip("\0").split("\0")
    return []
