"""The ranks made live: process group, device, and the few small agreements that everything else needs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from echelon.errors import WorldError
from echelon.world import World

#: Longer than any step or checkpoint should take; the launcher ends ranks that wait for a dead one much sooner.
TIMEOUT = timedelta(minutes=30)
_CPU = "cpu"
#: How often this process has joined ranks at an address.
_JOINS: Counter[str] = Counter()


class Ranks:
    """A joined world. Alone (size 1) it has no process group and every agreement is with itself."""

    def __init__(self, world: World, device: torch.device | None = None) -> None:
        self.world = world
        self.device = _device(world) if device is None or device == torch.device("cuda") else device
        self._owner = False
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if world.size > 1 and not dist.is_initialized():
            self._join()
        if dist.is_initialized() and dist.get_world_size() != world.size:
            raise WorldError(f"the process group has {dist.get_world_size()} ranks, the environment says {world.size}")

    def _join(self) -> None:
        rank, size = self.world.rank, self.world.size
        try:
            found, _, _ = next(dist.rendezvous(self.world.address, rank, size, timeout=TIMEOUT))
            found.set_timeout(TIMEOUT)
            # A second training in one script meets at the same place, where addresses of the first one's sockets may still lie.
            store = dist.PrefixStore(f"echelon-{_JOINS[self.world.address]}", found)
            _JOINS[self.world.address] += 1
            backend = choose_backend(_exchange(store, rank, size, _name(self.device)))
            group = dist.PrefixStore("group", store)
            dist.init_process_group(backend, store=group, rank=rank, world_size=size, timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise WorldError(
                f"rank {self.world.rank} could not join {self.world.size} ranks at {self.world.address}: {error}"
            ) from error
        self._owner = True

    @property
    def staged(self) -> bool:
        """Whether what the GPUs tell each other goes through the hosts' memory."""
        return self.device.type == "cuda" and self.world.size > 1 and "cuda:nccl" not in dist.get_backend_config()

    def mesh(self) -> DeviceMesh:
        """All ranks as one data axis."""
        return init_device_mesh(self.device.type, (self.world.size,), mesh_dim_names=("dp",))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order. For small plain values, outside the step."""
        if self.world.size == 1:
            return [value]
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value)
        return values

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` summed over the ranks, in place."""
        if self.world.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        """Wait for everybody."""
        if self.world.size > 1:
            dist.barrier()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What one rank cannot do no rank has done: an error on any rank becomes that error on all."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        failures = [(rank, failure) for rank, failure in enumerate(self.gather(error and _portable(error))) if failure]
        if error is not None:
            raise error
        if failures:
            rank, (kind, message) = failures[0]
            raise kind(f"rank {rank}: {message}")

    def close(self) -> None:
        """Leave the process group, if it was joined here."""
        if self._owner and dist.is_initialized():
            dist.destroy_process_group()
        self._owner = False


def choose_backend(devices: Sequence[str]) -> str:
    """The way in which ranks on these devices (one name each) talk.

    By the devices themselves: how many GPUs a rank sees says nothing, as a launcher may show each rank its own alone. NCCL
    refuses two ranks on one device; gloo carries CUDA tensors through the host.
    """
    alone = [rank for rank, device in enumerate(devices) if device == _CPU]
    if alone and len(alone) < len(devices):
        other = next(rank for rank, device in enumerate(devices) if device != _CPU)
        raise WorldError(
            f"rank {other} has a GPU and rank {alone[0]} has none: give every rank one, or hide them all (CUDA_VISIBLE_DEVICES=)"
        )
    return "gloo" if alone or len(set(devices)) < len(devices) else "cpu:gloo,cuda:nccl"


def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else _CPU


def _exchange(store: dist.Store, rank: int, size: int, value: str) -> list[str]:
    """Every rank's `value`, in rank order, before there is a process group."""
    store.set(f"echelon/device/{rank}", value)
    return [store.get(f"echelon/device/{each}").decode() for each in range(size)]


def _portable(error: Exception) -> tuple[type[Exception], str]:
    from echelon.errors import EchelonError

    return (
        (type(error), str(error))
        if isinstance(error, EchelonError)
        else (WorldError, f"{type(error).__name__}: {error}")
    )


def _device(world: World) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", world.local_rank % torch.cuda.device_count())
