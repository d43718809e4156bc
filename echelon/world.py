"""This process among the others: rank, sizes, address. The one place that reads RANK and its relatives.

Ways to be started, tried in this order: torchrun and our launchers (RANK, WORLD_SIZE, ...), Slurm (SLURM_PROCID, ...), Open MPI
(OMPI_COMM_WORLD_RANK, ...), alone. A half-set environment is an error: a guess would train N separate models.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from echelon.errors import WorldError

#: Where our own launcher puts the address of a file store (no port, so no race for one).
STORE = "ECHELON_STORE"

_SOURCES = {
    "torchrun": {"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE"},
    "slurm": {"rank": "SLURM_PROCID", "size": "SLURM_NTASKS", "local_rank": "SLURM_LOCALID"},
    "mpi": {
        "rank": "OMPI_COMM_WORLD_RANK",
        "size": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
}
#: Variables that hold the number of processes.
WORLD_SIZES = frozenset(names["size"] for names in _SOURCES.values())
#: Where Slurm says how many tasks each node has, the step's own first. SLURM_NTASKS_PER_NODE is there only where it was asked for.
_SLURM_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
#: Slurm numbers the steps that `srun` starts from 0; from this number on they are its own: batch script, interactive shell.
_SLURM_OWN_STEPS = 0xFFFFFFF0


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
        if names["rank"] not in env and names["size"] not in env:
            continue
        if source == "slurm" and not _started_by_srun(env):
            continue
        return _read(env, source, names)
    return World()


def variables_of_one(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of launchers that are set, with the values that describe a world of one."""
    env = os.environ if environment is None else environment
    one = {"rank": "0", "size": "1", "local_rank": "0", "local_size": "1"}
    return {name: one[part] for names in _SOURCES.values() for part, name in names.items() if name in env}


def _started_by_srun(env: Mapping[str, str]) -> bool:
    """Slurm describes the allocation to any shell in it, whatever its size; only what `srun` starts is a task of a step."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < _SLURM_OWN_STEPS


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where profiles, clusters, plans and copies of remote data are kept between runs: ECHELON_CACHE, else the user's cache folder."""
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
            f"{present}={env[present]} is set but {missing[0]} is not ({source}); start the ranks with torchrun or srun, "
            f"or unset {present} to run alone"
        )
    defaults = {"local_rank": env[names["rank"]], "local_size": env[names["size"]]}
    numbers = {part: _number(name, env.get(name, defaults.get(part, ""))) for part, name in names.items()}
    if source == "slurm":
        numbers["local_size"] = _slurm_local_size(env, numbers["size"])
    address = _address(env, source) if numbers["size"] > 1 else ""
    return World(**numbers, address=address, launched=True)


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"{name}={text!r} is not a whole number") from None


def _slurm_local_size(env: Mapping[str, str], size: int) -> int:
    """How many of a step's tasks share this node."""
    if size == 1:
        return 1
    name = next((name for name in _SLURM_TASKS if env.get(name)), None)
    if name is None:
        raise WorldError(
            f"{size} tasks under Slurm and none of {', '.join(_SLURM_TASKS)} is set: how many share a node is unknown; start the "
            "ranks with srun, or with torchrun on each node"
        )
    counts = _tasks_per_node(name, env[name])
    if len(set(counts)) == 1:
        return counts[0]
    node = env.get("SLURM_NODEID", "")
    if not node.isdigit() or int(node) >= len(counts):
        raise WorldError(
            f"{name}={env[name]} and SLURM_NODEID={node!r}: which of these nodes this is is unknown; start the ranks with srun"
        )
    return counts[int(node)]


def _tasks_per_node(name: str, text: str) -> list[int]:
    """Slurm's "4(x2),3" as [4, 4, 3]."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise WorldError(f"{name}={text!r} is not of Slurm's form 4(x2),3: tasks per node (x nodes)")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _address(env: Mapping[str, str], source: str) -> str:
    if STORE in env:
        return f"file://{env[STORE]}"
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not host or not port:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
        verb, it = ("is", "it") if len(missing) == 1 else ("are", "them")
        raise WorldError(
            f"several ranks but {' and '.join(missing)} {verb} not set: they cannot find each other; torchrun sets {it}, under Slurm "
            f"or MPI export {it}"
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


def usable_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or the limit of its container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return total
