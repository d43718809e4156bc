"""The environment of a process that we start on this machine: a launcher's rank, a test's rank, a measuring process."""

from __future__ import annotations

import os
import sys

#: torch's allocator on ARM (mimalloc) hands freed memory back to the system within milliseconds, and each step of a training
#: takes it out again, page by page: a tenth of a GPT step's time on 2 cores here. -1: keep it, for 9 % more memory at the peak there.
#: Read when torch is loaded.
_KEEP_MEMORY = ("MIMALLOC_PURGE_DELAY", "-1")
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def keep_memory() -> None:
    """Have torch, which is not loaded yet, keep the memory that it frees; `MIMALLOC_PURGE_DELAY` set by the user stays."""
    os.environ.setdefault(*_KEEP_MEMORY)


def child_environment(threads: int) -> dict[str, str]:
    """This process's environment, with `threads` threads and, unless the user says otherwise, talk on this machine only."""
    values = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    values.setdefault(*_KEEP_MEMORY)
    loopback = _LOOPBACK.get(sys.platform)
    if loopback is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            values.setdefault(name, loopback)  # nothing listens to other machines
    return values
