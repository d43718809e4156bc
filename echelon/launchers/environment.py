"""The environment of a child process on this machine: a launcher's rank, a test's rank, a measuring process."""

from __future__ import annotations

import multiprocessing
import os
import sys

#: torch's allocator on ARM (mimalloc) returns freed memory to the system within milliseconds, and every step faults it in
#: again: a tenth of a GPT step on 2 cores. -1: keep it, for 9 % more memory at the peak. Read when torch is loaded.
_KEEP_FREED_MEMORY = ("MIMALLOC_PURGE_DELAY", "-1")
#: Python's order of a set of strings follows from this seed. Ranks with different seeds would call modules in different
#: orders, and two launches of one job would compute different numbers.
_HASH_SEED = ("PYTHONHASHSEED", "0")
_LOOPBACK_INTERFACES = {"linux": "lo", "darwin": "lo0"}


def keep_freed_memory() -> None:
    """Have torch, once it is loaded, keep the memory that it frees, unless the user set `MIMALLOC_PURGE_DELAY`."""
    os.environ.setdefault(*_KEEP_FREED_MEMORY)


def fix_hash_seed() -> None:
    """Restart this process with a fixed hash seed, once, where it has a random one and can be restarted.

    Call it as early as possible: what the process did before is done again.
    """
    name, value = _HASH_SEED
    if not sys.flags.hash_randomization or os.environ.get(name, "random") != "random":
        return
    if multiprocessing.parent_process() is not None or hasattr(sys, "ps1") or "mpi4py" in sys.modules:
        return  # what its parent passed to it cannot be passed again
    os.environ[name] = value
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def child_environment(threads: int) -> dict[str, str]:
    """This process's environment with `threads` threads and, unless the user set them, a fixed hash seed and loopback traffic."""
    values = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    values.setdefault(*_KEEP_FREED_MEMORY)
    values.setdefault(*_HASH_SEED)
    loopback = _LOOPBACK_INTERFACES.get(sys.platform)
    if loopback is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            values.setdefault(name, loopback)  # do not listen to other machines
    return values
