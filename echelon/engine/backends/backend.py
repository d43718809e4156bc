"""How the data ranks of a run exchange gradients: one protocol, one implementation for each `exchange=` of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from echelon.data.loader import StepBatch
from echelon.engine.process_groups import Communicator


class Backend(Protocol):
    """What a step, an evaluation and a checkpoint ask of the gradient exchange. Every rank makes the same calls in the same order; a method that a
    backend leaves out does nothing."""

    #: Parameters whose rows are on servers: the ranks hold none of them.
    table_names: frozenset[str] = frozenset()
    #: Parameters that servers update, tables among them: their optimizer state is not on the ranks.
    server_trained: frozenset[str] = frozenset()
    #: Whether a step may be computed a second time before its update.
    can_repeat_step: bool = True
    #: The ranks that sum a step's loss and counts: only this one where ranks do not wait for each other.
    step_ranks: Communicator

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Run backward of a micro-batch; the `is_last` one completes the gradients."""
        ...

    def finish_backward(self) -> None:
        """Complete the gradients after the step's last backward."""
        ...

    def gradient_norm(self, gradients: Sequence[Tensor], replica_counts: Sequence[int]) -> Tensor:
        """The norm of the whole gradient: of this rank's `gradients`, held by `replica_counts` ranks each, and of those that servers get."""
        ...

    def look_ahead(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """The same batches; a backend that prefetches sees each one step early."""
        return batches

    def begin_step(self, batch: StepBatch) -> None:
        """Prepare the step's first forward."""
        return

    def begin_micro_batch(self, batch: Any, *, is_last: bool) -> None:
        """Prepare the forward of `batch`, which is on the device."""
        return

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the gradients that servers get."""
        return

    def update(self, *, skipped: bool) -> None:
        """Update the parameters that servers train, unless the step is `skipped`."""
        return

    def agree_to_stop(self, step: int, stop_requested: bool) -> bool | None:
        """Whether all ranks stop after `step`; None: the step's own message says so."""
        return None

    def settle(self) -> None:
        """Wait until all ranks have finished the same step."""
        return

    def synchronize(self) -> None:
        """Complete all updates in flight, so that every rank holds the same parameters."""
        return

    def pull_tables(self) -> dict[str, Tensor]:
        """The servers' tables, on rank 0."""
        return {}

    def gather_gradients(self) -> dict[str, Tensor]:
        """Gradients of the parameters that servers train, summed over ranks, on rank 0."""
        return {}

    def save(self, folder: Path) -> dict[str, Any] | None:
        """Write what servers hold into the checkpoint `folder`; returns the manifest's entry."""
        return None

    def load(self, folder: Path, step: int, entry: dict[str, Any] | None) -> None:
        """Resume from the checkpoint in `folder`, saved after `step` steps."""
        return

    def close(self) -> None:
        """Leave the servers."""
        return
