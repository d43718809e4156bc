"""This process among the others: rank, sizes, address. The one place that reads RANK and its relatives.

Ways to be started, tried in this order: torchrun and our launchers (RANK, WORLD_SIZE, ...), Slurm (SLURM_PROCID, ...), Open MPI
(OMPI_COMM_WORLD_RANK, ...), alone. A half-set environment is an error: a guess would train N separate models.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from echelon.errors import WorldError

#: Where our own launcher puts the address of a file store (no port, so no race for one).
STORE = "ECHELON_STORE"

_SOURCES = {
    "torchrun": {"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE"},
    "slurm": {
        "rank": "SLURM_PROCID",
        "size": "SLURM_NTASKS",
        "local_rank": "SLURM_LOCALID",
        "local_size": "SLURM_NTASKS_PER_NODE",
    },
    "mpi": {
        "rank": "OMPI_COMM_WORLD_RANK",
        "size": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Who this process is. `launched` says whether a launcher made it one of several (or the only one) on purpose."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    #: Where ranks meet: "file:///...", "env://", "tcp://host:port"; empty for a world of one.
    address: str = ""
    launched: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise WorldError(f"rank {self.rank} is outside a world of {self.size}; ranks run from 0 to WORLD_SIZE - 1")
        if not 0 <= self.local_rank < self.local_size <= self.size:
            raise WorldError(
                f"local rank {self.local_rank} of {self.local_size} does not fit a world of {self.size} ranks"
            )

    @property
    def main(self) -> bool:
        """Whether this is rank 0, the one that speaks."""
        return self.rank == 0


def read_world(environment: Mapping[str, str] | None = None) -> World:
    """The world that the environment describes."""
    env = os.environ if environment is None else environment
    for source, names in _SOURCES.items():
        # Slurm sets SLURM_PROCID in any shell of an allocation: one task is not a launch.
        if names["rank"] not in env and names["size"] not in env:
            continue
        if source == "slurm" and int(env.get("SLURM_NTASKS", "1")) == 1 and "SLURM_STEP_ID" not in env:
            continue
        return _read(env, source, names)
    return World()


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where profiles, clusters and plans are kept between runs: ECHELON_CACHE, else the user's cache folder."""
    env = os.environ if environment is None else environment
    if env.get("ECHELON_CACHE"):
        return Path(env["ECHELON_CACHE"])
    home = env.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "echelon"


def read_settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the user set as ECHELON_*, by name without the prefix: ECHELON_KEEP=5 is {"keep": "5"}."""
    env = os.environ if environment is None else environment
    return {name.removeprefix("ECHELON_").lower(): value for name, value in env.items() if name.startswith("ECHELON_")}


def visible_devices(environment: Mapping[str, str] | None = None) -> str:
    """Which GPUs this process is allowed to see, as CUDA_VISIBLE_DEVICES says it; "all" without it."""
    env = os.environ if environment is None else environment
    return env.get("CUDA_VISIBLE_DEVICES", "all")


def _read(env: Mapping[str, str], source: str, names: Mapping[str, str]) -> World:
    missing = [names[part] for part in ("rank", "size") if names[part] not in env]
    if missing:
        present = names["rank"] if missing[0] == names["size"] else names["size"]
        raise WorldError(
            f"{present}={env[present]} is set but {missing[0]} is not ({source}); start the ranks with torchrun or "
            f"`echelon launch`, or unset {present} to run alone"
        )
    numbers = {}
    for part, name in names.items():
        default = {"local_rank": env[names["rank"]], "local_size": env[names["size"]]}.get(part, "")
        text = env.get(name, default)
        try:
            numbers[part] = int(text)
        except ValueError:
            raise WorldError(f"{name}={text!r} is not a whole number") from None
    address = _address(env, source) if numbers["size"] > 1 else ""
    return World(**numbers, address=address, launched=True)


def _address(env: Mapping[str, str], source: str) -> str:
    if STORE in env:
        return f"file://{env[STORE]}"
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not host or not port:
        missing = " and ".join(name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name))
        raise WorldError(
            f"several ranks but {missing} is not set: they cannot find each other; torchrun sets it, under Slurm or MPI export it"
        )
    if not port.isdigit():
        raise WorldError(f"MASTER_PORT={port!r} is not a port number")
    # torchrun's agent already listens on that port: torch's own env:// knows how to join it, tcp:// would bind it again.
    return "env://" if source == "torchrun" else f"tcp://{host}:{port}"


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(int(quota) // int(period), 1))
    except (OSError, ValueError):
        pass
    return cores
