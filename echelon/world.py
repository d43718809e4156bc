"""This process among the others: rank, sizes, address. The one place that reads RANK, WORLD_SIZE and the like.

Launchers are tried in this order: torchrun and our own (RANK, WORLD_SIZE, ...), Slurm (SLURM_PROCID, ...), Open MPI
(OMPI_COMM_WORLD_RANK, ...), none. An incomplete environment is an error: a guess would train N separate models.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from echelon.errors import WorldError

#: Where our own launcher puts the address of a file store (no port, so no race for one).
STORE_VARIABLE = "ECHELON_STORE"

_LAUNCHER_VARIABLES = {
    "torchrun": {"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE"},
    "slurm": {"rank": "SLURM_PROCID", "size": "SLURM_NTASKS", "local_rank": "SLURM_LOCALID"},
    "mpi": {name: f"OMPI_COMM_WORLD_{name.upper()}" for name in ("rank", "size", "local_rank", "local_size")},
}
#: Variables that hold the number of processes.
WORLD_SIZE_VARIABLES = frozenset(names["size"] for names in _LAUNCHER_VARIABLES.values())
#: Slurm's numbers of tasks per node, the step's own first. SLURM_NTASKS_PER_NODE is set only on request.
_SLURM_TASK_VARIABLES = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
#: Slurm numbers the steps that `srun` starts from 0; those from this number on are its own: batch script, interactive shell.
_FIRST_RESERVED_SLURM_STEP = 0xFFFFFFF0


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Who this process is. `launched`: a launcher started it as one of several, or as the only one."""

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
            local = f"local rank {self.local_rank} of {self.local_size}"
            raise WorldError(f"{local} does not fit a world of {self.size} ranks")

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0


def read_world(environment: Mapping[str, str] | None = None) -> World:
    """The world that the environment describes."""
    env = os.environ if environment is None else environment
    for launcher, variables in _LAUNCHER_VARIABLES.items():
        if variables["rank"] not in env and variables["size"] not in env:
            continue
        if launcher == "slurm" and not _is_started_by_srun(env):
            continue
        return _parse_world(env, launcher, variables)
    return World()


def single_process_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of launchers that are set, with the values that describe a world of one."""
    env = os.environ if environment is None else environment
    fields = {variable: field for names in _LAUNCHER_VARIABLES.values() for field, variable in names.items()}
    return {variable: "1" if "size" in field else "0" for variable, field in fields.items() if variable in env}


def _is_started_by_srun(env: Mapping[str, str]) -> bool:
    """Whether this is a task of a step: Slurm describes the allocation to any shell in it, too."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < _FIRST_RESERVED_SLURM_STEP


def cache_folder() -> Path:
    """The cache of profiles, clusters, plans and copies of remote data: ECHELON_CACHE, else the user's cache folder."""
    if folder := os.environ.get("ECHELON_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "echelon"


def read_settings() -> dict[str, str]:
    """The ECHELON_* variables by name without the prefix: ECHELON_KEEP=5 is {"keep": "5"}."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("ECHELON_")}
    return {name.removeprefix("ECHELON_").lower(): value for name, value in settings.items()}


def visible_devices() -> str:
    """The value of CUDA_VISIBLE_DEVICES, or "all"."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all")


def _parse_world(env: Mapping[str, str], launcher: str, variables: Mapping[str, str]) -> World:
    missing = [variables[field] for field in ("rank", "size") if variables[field] not in env]
    if missing:
        present = variables["rank"] if missing[0] == variables["size"] else variables["size"]
        problem = f"{present}={env[present]} is set but {missing[0]} is not ({launcher})"
        raise WorldError(f"{problem}; start the ranks with torchrun or srun, or unset {present} to run alone")
    defaults = {"local_rank": env[variables["rank"]], "local_size": env[variables["size"]]}
    values = {name: _parse_int(key, env.get(key, defaults.get(name, ""))) for name, key in variables.items()}
    if launcher == "slurm":
        values["local_size"] = _slurm_local_size(env, values["size"])
    address = _rendezvous_address(env, launcher) if values["size"] > 1 else ""
    return World(**values, address=address, launched=True)


def _parse_int(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"{variable}={text!r} is not an integer") from None


def _slurm_local_size(env: Mapping[str, str], size: int) -> int:
    """The number of a step's tasks on this node."""
    if size == 1:
        return 1
    variable = next((variable for variable in _SLURM_TASK_VARIABLES if env.get(variable)), None)
    if variable is None:
        raise WorldError(
            f"{size} tasks under Slurm and none of {', '.join(_SLURM_TASK_VARIABLES)} is set: how many share a node is unknown; start the ranks with srun, or with torchrun on each node"
        )
    counts = _tasks_per_node(variable, env[variable])
    if len(set(counts)) == 1:
        return counts[0]
    node = env.get("SLURM_NODEID", "")
    if not node.isdigit() or int(node) >= len(counts):
        values = f"{variable}={env[variable]} and SLURM_NODEID={node!r}"
        raise WorldError(f"{values}: which of these nodes this is is unknown; start the ranks with srun")
    return counts[int(node)]


def _tasks_per_node(variable: str, text: str) -> list[int]:
    """Slurm's "4(x2),3" as [4, 4, 3]."""
    counts: list[int] = []
    for group in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group.strip())
        if match is None:
            raise WorldError(f"{variable}={text!r} is not of Slurm's form 4(x2),3: tasks per node (x nodes)")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _rendezvous_address(env: Mapping[str, str], launcher: str) -> str:
    if STORE_VARIABLE in env:
        return f"file://{env[STORE_VARIABLE]}"
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not host or not port:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
        verb, pronoun = ("is", "it") if len(missing) == 1 else ("are", "them")
        problem = f"several ranks but {' and '.join(missing)} {verb} not set: they cannot find each other"
        raise WorldError(f"{problem}; torchrun sets {pronoun}, under Slurm or MPI export {pronoun}")
    if not port.isdigit():
        raise WorldError(f"MASTER_PORT={port!r} is not a port number")
    # torchrun's agent already listens on that port: env:// joins it, tcp:// would bind it again.
    return "env://" if launcher == "torchrun" else f"tcp://{host}:{port}"


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(int(quota) // int(period), 1))
    return cores


def usable_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or the limit of its container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return total
