"""The process groups of a world: which ranks this one talks to, on which device, and the small agreements that everything else needs."""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from echelon.engine.connections import close_connections, forget_connections, record_connections
from echelon.errors import EchelonError, WorldError
from echelon.plan.mesh import AXES, Mesh
from echelon.world import World

#: Longer than any step or checkpoint should take; the launcher ends ranks that wait for a dead one much sooner.
_TIMEOUT = timedelta(minutes=30)
_CPU_NAME = "cpu"
#: By address, the store at which this process meets other ranks. Kept to the end: the last of a file's stores deletes the file when it goes,
#: and with it what a faster rank has written there for the next meeting.
_STORES: dict[str, dist.Store] = {}
#: How often ranks have met at an address, by purpose.
_STORE_COUNTS: Counter[tuple[str, str]] = Counter()


class Communicator:
    """Some ranks, this one among them. Alone it agrees with itself."""

    #: The mesh axis that it is, if any.
    axis = "dp"

    def __init__(self, rank: int, size: int, device: torch.device, device_mesh: DeviceMesh | None = None) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._device_mesh = device_mesh
        #: None: every rank there is.
        self.process_group = None if device_mesh is None else device_mesh.get_group()

    def device_mesh(self) -> DeviceMesh:
        """These ranks as a mesh, which torch's sharding takes."""
        if self._device_mesh is None:
            with record_connections():
                self._device_mesh = init_device_mesh(self.device.type, (self.size,), mesh_dim_names=(self.axis,))
        return self._device_mesh

    @property
    def via_host(self) -> bool:
        """Whether messages between GPUs go through the hosts' memory."""
        return self.device.type == "cuda" and self.size > 1 and "cuda:nccl" not in dist.get_backend_config()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order. For small plain values, outside the step."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def gather_object(self, value: Any) -> list[Any] | None:
        """Every rank's `value`, in rank order, on the first rank; None on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.process_group, group_dst=0)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """The first rank's `value`, on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.process_group, group_src=0)
        return values[0]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """`tensor` summed over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(group=self.process_group)

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """An error on any rank becomes that error on all."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        is_own = isinstance(error, EchelonError)
        picklable = (type(error), str(error)) if is_own else (WorldError, f"{type(error).__name__}: {error}")
        rank_errors = self.all_gather_object(error and picklable)
        if error is not None:
            raise error
        for rank, rank_error in enumerate(rank_errors):
            if rank_error is not None:
                raise rank_error[0](f"rank {rank}: {rank_error[1]}")


class WorldCommunicator(Communicator):
    """A joined world. Alone (size 1) it has no process group."""

    def __init__(self, world: World, device: torch.device | None = None) -> None:
        self.world = world
        if device is None or device == torch.device("cuda"):
            gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
            device = torch.device("cuda", world.local_rank % gpus) if gpus else torch.device("cpu")
        super().__init__(world.rank, world.size, device)
        self._owns_process_group = False
        #: Whether Python hashes strings differently on some ranks: sets then have different orders.
        self.hash_seeds_differ = False
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if world.size > 1 and not dist.is_initialized():
            self._join()
        if dist.is_initialized() and dist.get_world_size() != world.size:
            raise WorldError(f"the process group has {dist.get_world_size()} ranks, the environment says {world.size}")

    def _join(self) -> None:
        rank, size = self.world.rank, self.world.size
        try:
            store = open_shared_store(self.world, "echelon")
            # Before there is a process group, through the store.
            is_gpu = self.device.type == "cuda"
            device_name = str(torch.cuda.get_device_properties(self.device).uuid) if is_gpu else _CPU_NAME
            store.set(f"echelon/device/{rank}", f"{hash('echelon')} {device_name}")
            answers = [store.get(f"echelon/device/{other}").decode() for other in range(size)]
            hashes, devices = zip(*(answer.split(" ", 1) for answer in answers), strict=True)
            self.hash_seeds_differ = len(set(hashes)) > 1
            with record_connections():
                group_store, backend = dist.PrefixStore("group", store), choose_backend(devices)
                dist.init_process_group(backend, store=group_store, rank=rank, world_size=size, timeout=_TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise WorldError(f"rank {rank} could not join {size} ranks at {self.world.address}: {error}") from error
        self._owns_process_group = True

    def create_axes(self, mesh: Mesh) -> tuple[dict[str, Communicator], Communicator]:
        """This rank's communicator along each axis, and that of the ranks that compute the same samples together (tp x pp)."""
        alone = Communicator(0, 1, self.device)
        sizes = {axis: getattr(mesh, axis) for axis in AXES}
        split_axes = [axis for axis, size in sizes.items() if size > 1]
        if len(split_axes) < 2:  # an axis with all ranks needs no group of its own
            self.axis = split_axes[0] if split_axes else "dp"
            communicators = {axis: self if axis == self.axis else alone for axis in AXES}
            return communicators, self if self.axis in ("tp", "pp") else alone
        with record_connections():
            device_mesh = init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=AXES)
        coordinate = mesh.coordinate(self.rank)
        communicators = {a: Communicator(coordinate[a], n, self.device, device_mesh[a]) for a, n in sizes.items()}
        model_axes = [axis for axis in ("pp", "tp") if sizes[axis] > 1]
        if len(model_axes) < 2:
            return communicators, communicators[model_axes[0]] if model_axes else alone
        with record_connections():
            model_mesh = device_mesh["pp", "tp"]._flatten("model_parallel")
        return communicators, Communicator(model_mesh.get_local_rank(), model_mesh.size(), self.device, model_mesh)

    def split_by(self, key: Callable[[int], Hashable | None]) -> Communicator | None:
        """This rank's group of ranks with an equal key; None where its key is None. Every rank must call it, with the same keys."""
        ranks_by_key: dict[Hashable, list[int]] = {}
        for rank in range(self.size):
            if (rank_key := key(rank)) is not None:
                ranks_by_key.setdefault(rank_key, []).append(rank)
        if any(len(group_ranks) == self.size for group_ranks in ranks_by_key.values()):
            return self
        own = None
        # By all ranks, members or not: torch names a group that only its members make by the number of the process's groups, which
        # differs between ranks.
        with record_connections():
            for ranks in ranks_by_key.values():
                process_group = dist.new_group(ranks)
                if self.rank in ranks:
                    own = Communicator(ranks.index(self.rank), len(ranks), self.device)
                    own.process_group = process_group
        return own

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the process group, if it was joined here."""
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
            forget_connections()
        self._owns_process_group = False

    def abort(self) -> None:
        """Leave after an error that other ranks may not have: neither they nor this rank must wait."""
        close_connections()
        if self._owns_process_group and dist.is_initialized():
            # Destroying a group waits for its operations, and gloo may miss that a connection is closed: leak the group.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
        self.close()


def open_shared_store(world: World, purpose: str) -> dist.Store:
    """A store that all ranks of the world share, empty at each call: every rank must call it as often."""
    if world.address not in _STORES:
        store, _, _ = next(dist.rendezvous(world.address, world.rank, world.size, timeout=_TIMEOUT))
        store.set_timeout(_TIMEOUT)
        _STORES[world.address] = store
    count = _STORE_COUNTS[world.address, purpose]
    _STORE_COUNTS[world.address, purpose] += 1
    return dist.PrefixStore(f"{purpose}-{count}", _STORES[world.address])


def choose_backend(devices: Sequence[str]) -> str:
    """torch's backend for ranks on these devices, one name each: a launcher may show each rank its own GPU alone. NCCL refuses two ranks on one
    device; gloo carries CUDA tensors through the host."""
    if _CPU_NAME in devices and set(devices) != {_CPU_NAME}:
        gpu_rank = next(rank for rank, device in enumerate(devices) if device != _CPU_NAME)
        problem = f"rank {gpu_rank} has a GPU and rank {list(devices).index(_CPU_NAME)} has none"
        raise WorldError(f"{problem}: give every rank one, or hide them all (CUDA_VISIBLE_DEVICES=)")
    return "gloo" if _CPU_NAME in devices or len(set(devices)) < len(devices) else "cpu:gloo,cuda:nccl"
