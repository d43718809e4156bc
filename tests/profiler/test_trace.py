"""What the recorder notes of operators whose rate depends on how their bytes lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from echelon.trials.op_recorder import OpRecorder


@pytest.mark.parametrize(
    ("make", "names", "dims"),
    [
        (lambda: nn.LayerNorm(8)(torch.ones(3, 5, 8)).sum(), "native_layer_norm", (8.0, 15.0)),
        (lambda: nn.BatchNorm2d(4)(torch.ones(2, 4, 3, 5)).sum(), "native_batch_norm", (4.0, 15.0, 2.0)),
        (
            lambda: F.nll_loss(torch.ones(6, 7, requires_grad=True), torch.zeros(6, dtype=torch.long)),
            "nll_loss",
            (7.0, 6.0),
        ),
    ],
)
def test_rows_and_channels_are_noted_forward_and_backward(make: object, names: str, dims: tuple[float, ...]) -> None:
    with torch.autograd.set_multithreading_enabled(False), OpRecorder(1) as recorder:
        make().backward()  # type: ignore[operator]
    found = [call for call in recorder.trace.calls if call.name.startswith(names)]
    assert len(found) == 2
    assert {call.dims for call in found} == {dims}
