"""The ranks made live: process group, device, and the few small agreements that everything else needs."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import stat
import struct
import termios
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from echelon.errors import WorldError
from echelon.plan.mesh import AXES, Mesh
from echelon.world import World

#: Longer than any step or checkpoint should take; the launcher ends ranks that wait for a dead one much sooner.
TIMEOUT = timedelta(minutes=30)
_CPU_NAME = "cpu"
#: By address, the store at which this process meets other ranks. Kept to the end: the last of a file's stores deletes the file when it goes,
#: and with it what a faster rank has written there for the next meeting.
_STORES: dict[str, dist.Store] = {}
#: How often ranks have met at an address, by purpose.
_STORE_COUNTS: Counter[tuple[str, str]] = Counter()
#: The sockets that process groups opened: descriptor to inode, since a descriptor may be used again.
_SOCKET_INODES: dict[int, int] = {}
#: Seconds without data in either direction after which no message is under way, and how long to wait for that.
_IDLE_SECONDS, _IDLE_TIMEOUT = 0.25, 5.0


class Communicator:
    """Some ranks, this one among them, and the small agreements that they need. Alone it agrees with itself."""

    #: Of the axis, where it is one.
    axis = "dp"

    def __init__(self, rank: int, size: int, device: torch.device, device_mesh: DeviceMesh | None = None) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._device_mesh = device_mesh
        #: None: every rank there is.
        self.process_group = None if device_mesh is None else device_mesh.get_group()

    def device_mesh(self) -> DeviceMesh:
        """These ranks as torch's sharding wants them."""
        if self._device_mesh is None:
            with _record_connections():
                self._device_mesh = init_device_mesh(self.device.type, (self.size,), mesh_dim_names=(self.axis,))
        return self._device_mesh

    @property
    def via_host(self) -> bool:
        """Whether what the GPUs tell each other goes through the hosts' memory."""
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
        """Wait for everybody."""
        if self.size > 1:
            dist.barrier(group=self.process_group)

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """What one rank cannot do no rank has done: an error on any rank becomes that error on all."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        failures = [
            (rank, failure)
            for rank, failure in enumerate(self.all_gather_object(error and _picklable_error(error)))
            if failure
        ]
        if error is not None:
            raise error
        if failures:
            rank, (error_class, message) = failures[0]
            raise error_class(f"rank {rank}: {message}")


class WorldCommunicator(Communicator):
    """A joined world. Alone (size 1) it has no process group."""

    def __init__(self, world: World, device: torch.device | None = None) -> None:
        self.world = world
        super().__init__(
            world.rank,
            world.size,
            _default_device(world) if device is None or device == torch.device("cuda") else device,
        )
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
            hash_and_device = f"{hash('echelon')} {_device_name(self.device)}"
            hashes, devices = zip(
                *(text.split(" ", 1) for text in _gather_from_store(store, rank, size, hash_and_device)), strict=True
            )
            self.hash_seeds_differ = len(set(hashes)) > 1
            backend = choose_backend(devices)
            group_store = dist.PrefixStore("group", store)
            with _record_connections():
                dist.init_process_group(backend, store=group_store, rank=rank, world_size=size, timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise WorldError(
                f"rank {self.world.rank} could not join {self.world.size} ranks at {self.world.address}: {error}"
            ) from error
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
        with _record_connections():
            device_mesh = init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=AXES)
        coordinate = mesh.coordinate(self.rank)
        communicators = {
            axis: Communicator(coordinate[axis], size, self.device, device_mesh[axis]) for axis, size in sizes.items()
        }
        model_axes = [axis for axis in ("pp", "tp") if sizes[axis] > 1]
        if len(model_axes) < 2:
            return communicators, communicators[model_axes[0]] if model_axes else alone
        with _record_connections():
            model_mesh = device_mesh["pp", "tp"]._flatten("model_parallel")
        return communicators, Communicator(model_mesh.get_local_rank(), model_mesh.size(), self.device, model_mesh)

    def split_by(self, key: Callable[[int], Hashable | None]) -> Communicator | None:
        """This rank's group of those that have one key; None where its key is None. Every rank must call it, with the same keys."""
        ranks_by_key: dict[Hashable, list[int]] = {}
        for rank in range(self.size):
            if (rank_key := key(rank)) is not None:
                ranks_by_key.setdefault(rank_key, []).append(rank)
        if any(len(group_ranks) == self.size for group_ranks in ranks_by_key.values()):
            return self
        own = None
        # By all ranks, members or not: torch names a group that only its members make by how many groups the process has, which
        # differs between ranks.
        with _record_connections():
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
            _SOCKET_INODES.clear()
        self._owns_process_group = False

    def abort(self) -> None:
        """Leave it after an error that other ranks may not have: none waits for this rank, nor this rank for them."""
        close_connections()
        if self._owns_process_group and dist.is_initialized():
            # Destroying a group waits for its operations, and gloo may miss that one's connection is closed: it is never freed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
        self.close()


def close_connections() -> None:
    """End this rank's connections to others, in any thread: whatever waits for them fails. By hand, as gloo's abort() closes nothing and a
    destroyed group keeps its connections as long as anything in torch refers to it."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connection) for connection in _open_connections()]
        # gloo does not fail an operation whose message is cut off: its sender or receiver would never return.
        deadline = time.monotonic() + _IDLE_TIMEOUT
        while not all(map(_is_idle, connections)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _open_connections() -> Iterator[socket.socket]:
    """Copies of the recorded sockets that are still connected. Those that listen stay open: gloo's thread aborts when one ends."""
    for descriptor, inode in list(_SOCKET_INODES.items()):
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                connection = socket.socket(fileno=os.dup(descriptor))
                try:
                    connection.getpeername()
                except OSError:
                    connection.close()
                else:
                    yield connection


def _is_idle(connection: socket.socket) -> bool:
    """Whether nothing is on its way over it, nor has been for a while."""
    try:
        for queue in (termios.FIONREAD, termios.TIOCOUTQ):
            if any(fcntl.ioctl(connection, queue, bytes(4))):
                return False
        if not hasattr(socket, "TCP_INFO"):  # not on Linux
            return True
        # struct tcp_info: milliseconds since data was last sent and received
        tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    except OSError:  # closed by now
        return True
    sent, _, received = struct.unpack_from("3I", tcp_info, 44)
    return min(sent, received) >= 1000 * _IDLE_SECONDS


def open_shared_store(world: World, purpose: str) -> dist.Store:
    """A store that all ranks of the world share, empty at each call: every rank must call it as often."""
    if world.address not in _STORES:
        store, _, _ = next(dist.rendezvous(world.address, world.rank, world.size, timeout=TIMEOUT))
        store.set_timeout(TIMEOUT)
        _STORES[world.address] = store
    count = _STORE_COUNTS[world.address, purpose]
    _STORE_COUNTS[world.address, purpose] += 1
    return dist.PrefixStore(f"{purpose}-{count}", _STORES[world.address])


@contextlib.contextmanager
def _record_connections() -> Iterator[None]:
    before = _list_sockets()
    try:
        yield
    finally:
        _SOCKET_INODES.update(_list_sockets().items() - before.items())


def _list_sockets() -> dict[int, int]:
    """This process's open internet sockets: descriptor to inode."""
    inodes: dict[int, int] = {}
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed again
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as duplicate:
                    if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                        inodes[int(name)] = status.st_ino
    return inodes


def choose_backend(devices: Sequence[str]) -> str:
    """The way in which ranks on these devices (one name each) talk.

    By the devices themselves: how many GPUs a rank sees says nothing, as a launcher may show each rank its own alone. NCCL
    refuses two ranks on one device; gloo carries CUDA tensors through the host.
    """
    cpu_ranks = [rank for rank, device in enumerate(devices) if device == _CPU_NAME]
    if cpu_ranks and len(cpu_ranks) < len(devices):
        gpu_rank = next(rank for rank, device in enumerate(devices) if device != _CPU_NAME)
        raise WorldError(
            f"rank {gpu_rank} has a GPU and rank {cpu_ranks[0]} has none: give every rank one, or hide them all (CUDA_VISIBLE_DEVICES=)"
        )
    return "gloo" if cpu_ranks or len(set(devices)) < len(devices) else "cpu:gloo,cuda:nccl"


def _device_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else _CPU_NAME


def _gather_from_store(store: dist.Store, rank: int, size: int, value: str) -> list[str]:
    """Every rank's `value`, in rank order, before there is a process group."""
    store.set(f"echelon/device/{rank}", value)
    return [store.get(f"echelon/device/{other}").decode() for other in range(size)]


def _picklable_error(error: Exception) -> tuple[type[Exception], str]:
    from echelon.errors import EchelonError

    return (
        (type(error), str(error))
        if isinstance(error, EchelonError)
        else (WorldError, f"{type(error).__name__}: {error}")
    )


def _default_device(world: World) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", world.local_rank % torch.cuda.device_count())
