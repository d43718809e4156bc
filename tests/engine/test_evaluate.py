"""Metrics of any kind are averaged over samples in full precision, on any device."""

from __future__ import annotations

import pytest
import torch

from echelon.engine.run import Run
from echelon.errors import JobError
from echelon.plan.plan import Plan
from echelon.world import World
from tests.engine.jobs import classes, mlp, numbers

METRICS = {
    "number": lambda output, batch: 3.5,
    "whole": lambda output, batch: 2,
    "pair": lambda output, batch: (7, 2.0),
    "mixed": lambda output, batch: (output.sum() * 0 + len(output), len(output)),
    "host": lambda output, batch: torch.tensor(1.5),
    "half": lambda output, batch: output.new_ones((), dtype=torch.bfloat16),
    "one": lambda output, batch: output.new_ones(1),
}
WANTED = {"number": 3.5, "whole": 2, "pair": 3.5, "mixed": 1, "host": 1.5, "half": 1, "one": 1}


def evaluated(device: str) -> dict[str, float]:
    """257 samples at once: one more than bfloat16 can count."""
    data = torch.utils.data.TensorDataset(numbers(257, 8), classes(257))
    job = mlp(data=data, evaluation=data, batch=257, metrics=METRICS)
    with Run(job, Plan(), World(), device=torch.device(device)) as run:
        return run.evaluate()


def test_metrics_may_be_numbers_or_tensors() -> None:
    found = evaluated("cpu")
    del found["loss"]
    assert found == WANTED


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_metrics_may_be_numbers_or_tensors_on_a_gpu() -> None:
    found = evaluated("cuda")
    del found["loss"]
    assert found == WANTED


def test_a_metric_that_is_no_scalar_is_named() -> None:
    job = mlp(evaluation=mlp().data, metrics={"rows": lambda output, batch: output[:, 0]})
    with (
        Run(job, Plan(), World()) as run,
        pytest.raises(JobError, match=r"metric 'rows' gave a tensor of shape \(16,\)"),
    ):
        run.evaluate()
