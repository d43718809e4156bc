"""What a GPU's host takes per operator, on the GPU that is here."""

from __future__ import annotations

import pytest
import torch

from echelon.hardware.launch_overhead import LaunchTimer


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_way_of_issuing_operators_is_timed() -> None:
    hosts = LaunchTimer()
    hosts.time_all()
    found = hosts.compute_medians()
    ways = {"host adding"} | {
        f"host {what}"
        for kind in ("matmul", "convolution")
        for what in (
            f"forward {kind}", f"backward {kind}", f"forward {kind} block", f"again {kind} block", f"forward {kind} selective",
            f"again {kind} selective",
        )
    }  # fmt: skip
    assert set(found) == ways
    assert all(1e-9 <= each < 1e-2 for each in found.values())
    assert found["host forward matmul selective"] > found["host forward matmul"]
