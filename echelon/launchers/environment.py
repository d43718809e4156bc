"""The environment of a process that we start on this machine: a launcher's rank, a test's rank, a measuring process."""

from __future__ import annotations

import os
import sys

_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def child_environment(threads: int) -> dict[str, str]:
    """This process's environment, with `threads` threads and, unless the user says otherwise, talk on this machine only."""
    values = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    loopback = _LOOPBACK.get(sys.platform)
    if loopback is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            values.setdefault(name, loopback)  # nothing listens to other machines
    return values
