"""Micro-batches through the stages of a pipeline, on torch's own stages and schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from echelon.engine.stage import Stage

_SCHEDULES: dict[str, Any] = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
}


class Pipeline:
    """This rank's stages among all of them. `run` takes a step's micro-batches forward and backward."""

    def __init__(
        self,
        stages: Sequence[Stage],
        numbers: Sequence[int],
        total: int,
        *,
        schedule: str,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._stages, self._numbers, self._total = list(stages), list(numbers), total
        self._schedule, self._group, self._device = schedule, group, device
        self._batches: Sequence[Any] = ()
        self._made: dict[Any, Any] = {}
        self.final = any(stage.final for stage in stages)

    def run(self, batches: Sequence[Any], loss: Callable[[Any, int], Tensor]) -> None:
        """Forward and backward of every micro-batch; `loss(output, index)` gives what backward starts from, on the last stage.

        The micro-batches are of one shape: torch's stages receive into buffers that were made beforehand.
        """
        self._batches = batches
        self._loss = loss
        schedule = self._ready(len(batches), batches[0])
        indices = torch.arange(len(batches))
        given = (torch.zeros(len(batches), device=self._device),) if 0 in self._numbers else ()
        schedule.step(
            *given, index=indices, **({"target": indices, "losses": []} if self.final else {}), **_silent(schedule)
        )
        self._batches = ()

    def _ready(self, count: int, example: Any) -> Any:
        """The schedule for so many micro-batches of this shape."""
        shapes = [stage.shapes(example) for stage in self._stages]
        key = count, tuple(tuple((t.shape, t.dtype) for t in (*inner, *outer)) for inner, outer in shapes)
        if key not in self._made:
            parts = [
                PipelineStage(
                    _Fed(stage, self),
                    number,
                    self._total,
                    self._device,
                    input_args=inner if number else (torch.zeros(1, device="meta"),),
                    output_args=outer,
                    group=self._group,
                )
                for stage, number, (inner, outer) in zip(self._stages, self._numbers, shapes, strict=True)
            ]
            kind = _SCHEDULES[self._schedule]
            several = issubclass(kind, PipelineScheduleMulti)
            self._made[key] = kind(parts if several else parts[0], count, loss_fn=self._loss_of, scale_grads=False)
        return self._made[key]

    def _loss_of(self, output: Any, index: Tensor) -> Tensor:
        return self._loss(output, int(index))


class _Fed(torch.nn.Module):
    """A stage that takes its micro-batch by number: every rank reads the batch itself."""

    def __init__(self, stage: Stage, pipeline: Pipeline) -> None:
        super().__init__()
        self.stage = stage
        self._pipeline = [pipeline]  # in a list: not a submodule

    def forward(self, *received: Tensor, index: Tensor) -> Any:
        batch = self._pipeline[0]._batches[int(index)]
        return self.stage(*(received if self.stage.first else ()), batch=batch)


def _silent(schedule: Any) -> dict[str, bool]:
    """Outputs are losses here: nobody wants them merged."""
    return {"return_outputs": False}
