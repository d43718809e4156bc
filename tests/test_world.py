"""Who this process is, from whatever started it; a half-set environment is an error, not a guess."""

from __future__ import annotations

import pytest

from echelon.errors import WorldError
from echelon.world import World, read_world, single_process_variables

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "29500",
}


def test_alone() -> None:
    assert read_world({}) == World(rank=0, size=1)
    assert not read_world({}).launched


def test_torchrun() -> None:
    world = read_world(TORCHRUN)
    assert world == World(rank=3, size=4, local_rank=1, local_size=2, address="env://", launched=True)
    assert not world.is_main


def test_our_launcher_meets_in_a_file() -> None:
    assert read_world({"RANK": "0", "WORLD_SIZE": "2", "ECHELON_STORE": "/tmp/x"}).address == "file:///tmp/x"


def test_variables_of_one_process_cover_every_launcher_that_is_set() -> None:
    assert single_process_variables({"RANK": "3", "SLURM_NTASKS": "8", "HOME": "/"}) == {
        "RANK": "0",
        "SLURM_NTASKS": "1",
    }


def test_slurm_and_mpi() -> None:
    place = {"MASTER_ADDR": "h", "MASTER_PORT": "1"}
    slurm = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_STEP_ID": "0",
    }
    mpi = {
        "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    }  # fmt: skip
    wanted = World(rank=5, size=8, local_rank=1, local_size=4, address="tcp://h:1", launched=True)
    assert read_world(slurm | place) == wanted
    assert read_world(mpi | place) == wanted


SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize(
    ("tasks", "size"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "11"}, 11),
        ({"SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, 4),
        ({"SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 3),
        # The step's own counts go before the allocation's.
        ({"SLURM_STEP_TASKS_PER_NODE": "6,5", "SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_NODEID": "0"}, 6),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, 1),
    ],
)
def test_slurm_says_how_many_ranks_share_the_node(tasks: dict[str, str], size: int) -> None:
    assert read_world(SRUN | tasks).local_size == size


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967290"}])
@pytest.mark.parametrize("tasks", ["1", "8", "many"])
def test_a_shell_inside_an_allocation_is_no_launch(tasks: str, step: dict[str, str]) -> None:
    """The batch script of `sbatch --ntasks 8` is one process; 4294967290 is the step of an interactive shell."""
    assert read_world({"SLURM_PROCID": "0", "SLURM_NTASKS": tasks} | step) == World()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, r"RANK=0 is set but WORLD_SIZE is not \(torchrun\)"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "several ranks but MASTER_ADDR and MASTER_PORT are not set: .* sets them"),
        (TORCHRUN | {"MASTER_PORT": ""}, "several ranks but MASTER_PORT is not set: .* sets it"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a port number"),
        (TORCHRUN | {"RANK": "x"}, "RANK='x' is not an integer"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 is outside a world of 4"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "local rank 2 of 2 does not fit"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not"),
        ({"RANK": "0"}, "start the ranks with torchrun or srun, or unset RANK to run alone"),
        (SRUN, "11 tasks under Slurm and none of SLURM_STEP_TASKS_PER_NODE, .* is set: how many share a node"),
        (SRUN | {"SLURM_NTASKS": "many"}, "SLURM_NTASKS='many' is not an integer"),
        (SRUN | {"SLURM_TASKS_PER_NODE": "4x2"}, "SLURM_TASKS_PER_NODE='4x2' is not of Slurm's form"),
        (SRUN | {"SLURM_TASKS_PER_NODE": "4(x2),3"}, "SLURM_NODEID='': which of these nodes this is is unknown"),
    ],
)
def test_a_half_set_environment_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(WorldError, match=message):
        read_world(environment)
