"""The most memory that this process has used."""

from __future__ import annotations

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Bytes at the peak: the allocator's on an accelerator, the whole process's resident memory on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource
    import sys

    bytes_per_unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_unit
