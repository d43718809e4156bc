"""Every error that echelon raises on purpose.

EchelonError                 what, where, what instead; never a traceback on the command line
├── DocumentError            a plan, profile, cluster or certificate file that cannot be read as one
├── PlanError                a plan that this job or these devices cannot execute (.problems lists why)
│   └── UnsplittableModelError  tp or pp finds nothing in the model to split: use zero=3 over the same ranks
├── JobError                 a job file or a Job that does not describe a training
├── DataError                a data set that cannot give the samples it promised
│   ├── MissingDataError     a file is gone or differs from the one that was packed: a retry would not help
│   ├── CorruptDataError     a block fails its checksum: another copy of the file may be intact
│   └── CacheFullError       the cache of remote files is full until one in use is released
├── FileLockError            a file that cannot be locked because its file system has no locks
├── WorldError               ranks that are started wrongly or do not agree with each other
├── LaunchError              ranks that could not be started, or one that died
├── CheckpointError          a checkpoint that is missing, damaged or cannot be written
│   └── IncompatibleCheckpointError  complete, but of another job or format: an older one would not fit either
├── TrainingError            a training that cannot go on (a loss that is not a number, ...)
│   └── DivergenceError      ranks that must compute the same do not, or compute something else than one device (.tensor, .rank)
│       └── UnshardableStateError  the model keeps state that split batches cannot keep as the whole batch does
├── ServerError              parameter servers that cannot be reached, refuse, or cannot go on
│   └── ShardsLostError      all replicas of some shards are gone (.shards names them)
└── VerificationError        the answer of a proof is no
    └── UnverifiedPlanError  a plan that may not train: its proof failed or could not be made
"""

from __future__ import annotations

from collections.abc import Sequence


class EchelonError(Exception):
    """Root of the tree. `exit_code`: 1 the answer is no, 2 wrong use."""

    exit_code = 2


class DocumentError(EchelonError):
    """A plan, profile, cluster or certificate that cannot be read as one."""


class PlanError(EchelonError):
    """A plan that cannot be executed. `problems` holds each reason."""

    def __init__(self, message: str, problems: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class UnsplittableModelError(PlanError):
    """A plan whose tp or pp finds nothing of the model to cut: sharded data parallelism over the same ranks would do."""


class JobError(EchelonError):
    """A job file or a Job that does not describe a training."""


class DataError(EchelonError):
    """A data set that cannot give the samples it promised."""


class MissingDataError(DataError):
    """A file that is not there, or not as it was packed: to try again would not help."""


class CorruptDataError(DataError):
    """A block that is not as it was packed: another copy of its file may be."""


class CacheFullError(DataError):
    """No room for a copy of a remote file, until another that is in use is let go."""


class FileLockError(EchelonError):
    """A file that cannot be locked because its file system has no locks."""


class WorldError(EchelonError):
    """Ranks that are started wrongly or do not agree with each other."""


class LaunchError(EchelonError):
    """Ranks that could not be started, or one that died.

    `error_class`: the class of that rank's own error, if it reported one; `started`: whether steps were trained before.
    """

    exit_code = 1
    error_class = ""
    started = False


class CheckpointError(EchelonError):
    """A checkpoint that is missing, damaged or cannot be written."""


class IncompatibleCheckpointError(CheckpointError):
    """A whole checkpoint of another job or format: an older one would not fit either."""


class TrainingError(EchelonError):
    """A training that cannot go on."""

    exit_code = 1


class DivergenceError(TrainingError):
    """Ranks that must compute the same do not, or together compute something else than one device would.

    `rank` and `tensor` name where it was seen, `cause` why it probably happened; None where that is not known. `last_agreed_step`: the last step that
    was checked and found right, where later ones may be wrong.
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
    """A model whose state follows from whole batches (a queue, a codebook): ranks or micro-batches cannot keep it as one device does."""


class VerificationError(EchelonError):
    """The answer of a proof is no."""

    exit_code = 1


class UnverifiedPlanError(VerificationError):
    """A plan that may not train, because its proof failed or could not be made."""


class ServerError(EchelonError):
    """Parameter servers that cannot be reached, refuse what was asked, or cannot go on."""

    exit_code = 1


class ShardsLostError(ServerError):
    """All replicas of some shards are gone."""

    def __init__(self, message: str, shards: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.shards = tuple(shards)
