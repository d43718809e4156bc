"""The exception tree of echelon.

EchelonError                          root: what, where and what to do instead; on the command line one message, no traceback
├── DocumentError                     a plan, profile, cluster or certificate file that cannot be read
├── PlanError                         a plan that this job or these devices cannot execute (.problems lists the reasons)
│   └── UnsplittableModelError        its tp or pp finds nothing to split; zero=3 over the same ranks would work
├── JobError                          an invalid job file, Job or setting
├── DataError                         a data set that cannot deliver its samples
│   ├── MissingDataError              a file that is gone or was replaced; retrying does not help
│   ├── CorruptDataError              a block with a wrong checksum; another copy of the file may be intact
│   └── CacheFullError                no space to cache a remote file until one in use is released
├── FileLockError                     a file on a file system without locks
├── WorldError                        ranks that were started wrongly or disagree
├── LaunchError                       ranks that could not be started, or one that died
├── CheckpointError                   a checkpoint that is missing, damaged or cannot be written
│   └── IncompatibleCheckpointError   an intact checkpoint of another job or format; older ones would not fit either
├── TrainingError                     a training that cannot continue (a loss that is NaN, ...)
│   └── DivergenceError               ranks, or ranks and one device, compute different values (.rank, .tensor)
│       └── UnshardableStateError     the model keeps state that parts of a batch cannot update as the whole batch does
├── ServerError                       parameter servers that are unreachable, refuse a request or cannot continue
│   └── ShardsLostError               all replicas of some shards are gone (.shards)
└── VerificationError                 a failed verification
    └── UnverifiedPlanError           a plan that must not train: its proof failed or could not be made
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class EchelonError(Exception):
    """Root of the tree. `exit_code`: 1 the answer is no, 2 wrong use."""

    exit_code = 2


def first_line(error: BaseException) -> str:
    """The message of an error, shortened to its first line."""
    return (str(error).strip().splitlines() or [""])[0][:160]


def describe_error(error: BaseException) -> str:
    """`ValueError: the first line of its message`."""
    return f"{type(error).__name__}: {first_line(error)}"


class DocumentError(EchelonError):
    """A plan, profile, cluster or certificate file that cannot be read."""


class PlanError(EchelonError):
    """A plan that cannot be executed; `problems` lists the reasons."""

    def __init__(self, message: str, problems: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class UnsplittableModelError(PlanError):
    """A plan whose tp or pp finds nothing to split; sharded data parallelism over the same ranks would work."""


class JobError(EchelonError):
    """An invalid job file, Job or setting."""


class DataError(EchelonError):
    """A data set that cannot deliver its samples."""


class MissingDataError(DataError):
    """A file that is gone or was replaced; retrying does not help."""


class CorruptDataError(DataError):
    """A block with a wrong checksum; another copy of the file may be intact."""


class CacheFullError(DataError):
    """No space to cache a remote file until one in use is released."""


class FileLockError(EchelonError):
    """A file that cannot be locked because its file system has no locks."""


class WorldError(EchelonError):
    """Ranks that were started wrongly or disagree."""


class LaunchError(EchelonError):
    """Ranks that could not be started, or one that died.

    `error_class`: class name of that rank's own error, if it reported one. `started`: whether steps were trained before.
    """

    exit_code = 1
    error_class = ""
    started = False


class CheckpointError(EchelonError):
    """A checkpoint that is missing, damaged or cannot be written."""


class IncompatibleCheckpointError(CheckpointError):
    """An intact checkpoint of another job or format; older ones would not fit either."""


class TrainingError(EchelonError):
    """A training that cannot continue."""

    exit_code = 1


class DivergenceError(TrainingError):
    """Ranks that must agree compute different values, or together compute something else than one device would.

    `rank` and `tensor`: where it was seen; `cause`: the likely reason; None if unknown. `last_agreed_step`: the last step that
    was checked and correct, if later ones may be wrong.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        tensor: str | None = None,
        cause: str | None = None,
        last_agreed_step: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank, self.tensor, self.cause, self.last_agreed_step = rank, tensor, cause, last_agreed_step


class UnshardableStateError(DivergenceError):
    """A model with state that depends on whole batches (a queue, a codebook), which ranks or micro-batches cannot reproduce."""


class VerificationError(EchelonError):
    """A failed verification."""

    exit_code = 1


class UnverifiedPlanError(VerificationError):
    """A plan that must not train: its proof failed or could not be made."""


class ServerError(EchelonError):
    """Parameter servers that are unreachable, refuse a request or cannot continue."""

    exit_code = 1


class ShardsLostError(ServerError):
    """All replicas of some shards are gone."""

    def __init__(self, message: str, shards: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.shards = tuple(shards)


def suggest_name(name: str, known_names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest known one, else all of them."""
    known_names = list(known_names)
    close_matches = difflib.get_close_matches(name, known_names, 1)
    return f"did you mean {close_matches[0]}?" if close_matches else f"known names: {', '.join(known_names)}"
