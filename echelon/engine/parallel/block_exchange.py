"""Exchange blocks of tensors between ranks, in one all-to-all of raw bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.engine.process_groups import Communicator

#: Tensors in a message start at multiples of this many bytes, so that any dtype can be read in place.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """A block of a full tensor: where it begins, and its shape."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.shape, strict=True))


#: (sender, receiver) -> the blocks that go there.
Routes = Mapping[tuple[int, int], Sequence[TensorBlock]]


def exchange_blocks(
    routes: Routes, ranks: Communicator, read: Callable[[TensorBlock], Tensor], dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[TensorBlock, Tensor]]:
    """Send `read(block)` for each of this rank's blocks; yields the blocks that arrive, with their values. Every rank must call it."""
    device = torch.device("cpu") if ranks.via_host else ranks.device
    outgoing = [routes.get((ranks.rank, peer), ()) for peer in range(ranks.size)]
    incoming = [routes.get((peer, ranks.rank), ()) for peer in range(ranks.size)]

    def padded_bytes(block: TensorBlock) -> int:
        return -(-block.numel * dtypes[block.name].itemsize // _ALIGNMENT) * _ALIGNMENT

    sent_bytes, received_bytes = ([sum(map(padded_bytes, b)) for b in peers] for peers in (outgoing, incoming))
    sent = torch.zeros(sum(sent_bytes), dtype=torch.uint8, device=device)
    offset = 0
    for block in chain.from_iterable(outgoing):
        data = read(block).detach().contiguous().reshape(-1).view(torch.uint8)
        sent[offset : offset + len(data)] = data
        offset += padded_bytes(block)
    received = torch.empty(sum(received_bytes), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, sent, received_bytes, sent_bytes, group=ranks.process_group)
    received, offset = received.to(ranks.device), 0
    for block in chain.from_iterable(incoming):
        dtype = dtypes[block.name]
        yield block, received[offset : offset + block.numel * dtype.itemsize].view(dtype).view(block.shape)
        offset += padded_bytes(block)
