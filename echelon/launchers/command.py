"""The command that a person gave, so that it can be told again: by a rank, which was started by another."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

#: The user's own words, from the process that starts ranks; the ranks' are not what anybody typed.
COMMAND = "ECHELON_COMMAND"
#: What torchrun gives every process that it starts.
_TORCHRUN = "TORCHELASTIC_RUN_ID"
#: Programs that are installed as scripts: their name says it all, their Python and their folder do not matter.
_INSTALLED = ("echelon", "torchrun")


def given_command() -> list[str]:
    """The words of the command that led to this process; empty where they are not known (srun, mpirun)."""
    told = os.environ.get(COMMAND)
    if told is not None:
        return [str(word) for word in json.loads(told)]
    if _TORCHRUN in os.environ:
        return _plain(_parent())
    return [] if {"RANK", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK"} & set(os.environ) else _plain(sys.orig_argv)


def tell_command() -> dict[str, str]:
    """What a rank needs in its environment to know the command."""
    return {COMMAND: json.dumps(given_command())}


def _plain(words: Sequence[str]) -> list[str]:
    name = Path(words[1]).name if len(words) > 1 else ""
    return [name, *words[2:]] if name in _INSTALLED else list(words)


def _parent() -> list[str]:
    """torchrun's agent is the parent of its ranks."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{os.getppid()}/cmdline").read_text().rstrip("\0").split("\0")
    return []
