"""What commands that tests start see of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def environment(cache: Path) -> dict[str, str]:
    """Their environment: this checkout, documents of their own, and room for two ranks, which one GPU has not: then the CPU."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.device_count() == 1 else {}
    return {**os.environ, **hidden, "ECHELON_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
