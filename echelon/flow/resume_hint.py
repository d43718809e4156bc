"""How a person goes on with a run that was stopped."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

from echelon.flow.job_source import main_script


def resume_instructions(command: Sequence[str], folder: Path, *, fresh: bool) -> str:
    """The command that was given; one that asked for a fresh start would not go on, so that is taken out of it."""
    if not command or main_script() is None:
        return "the same command" + (f" with out={str(folder)!r} and resume=True" if fresh else "")
    if not fresh:
        return shlex.join(command)
    if not _is_train_command(command):
        return f"{shlex.join(command)}, with out={str(folder)!r} and resume=True in it"
    words = [word for word in command if word != "--fresh"]
    return shlex.join([*words, "--resume", "--out", str(folder)])


def _is_train_command(command: Sequence[str]) -> bool:
    """Whether it is `echelon train ...`, whoever starts it."""
    return any(word == "train" and previous.endswith("echelon") for previous, word in itertools.pairwise(command))
