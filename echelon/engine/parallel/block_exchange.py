"""Exchange blocks of tensors between ranks, in one all-to-all of raw bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.engine.process_groups import Communicator

#: Tensors in a message start at multiples of this many bytes, so that any dtype can be read in place.
_ALIGNMENT = 16
#: Shape and dtype of a tensor in a message.
Header = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """A block of a full tensor: where it begins, and its shape."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.shape, strict=True))


#: (sender, receiver) -> the blocks that go there.
Routes = Mapping[tuple[int, int], Sequence[TensorBlock]]


def exchange_blocks(
    routes: Routes,
    communicator: Communicator,
    device: torch.device,
    *,
    read: Callable[[Sequence[TensorBlock]], Sequence[Tensor]],
    headers: Callable[[Sequence[TensorBlock]], Sequence[Header]],
) -> Iterator[tuple[Sequence[TensorBlock], list[Tensor]]]:
    """Send what `read` returns for this rank's blocks; yields the blocks that arrive with their tensors, which `headers` describes.

    Every rank of the group must call it.
    """
    rank, ranks = communicator.rank, range(communicator.size)
    transfer_device = torch.device("cpu") if communicator.via_host else device
    outgoing = [read(routes[rank, peer]) if (rank, peer) in routes else () for peer in ranks]
    expected = [headers(routes[peer, rank]) if (peer, rank) in routes else () for peer in ranks]
    messages = [_pack(tensors, transfer_device) for tensors in outgoing]
    lengths = [sum(_padded_bytes(*header) for header in peer_headers) for peer_headers in expected]
    incoming = torch.empty(sum(lengths), dtype=torch.uint8, device=transfer_device)
    message_lengths = [len(message) for message in messages]
    dist.all_to_all_single(incoming, torch.cat(messages), lengths, message_lengths, group=communicator.process_group)
    for peer, message in enumerate(incoming.to(device).split(lengths)):
        if (peer, rank) in routes:
            yield routes[peer, rank], list(_unpack(message, expected[peer]))


def _padded_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _pack(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    message_bytes = sum(_padded_bytes(tensor.shape, tensor.dtype) for tensor in tensors)
    message = torch.zeros(message_bytes, dtype=torch.uint8, device=device)
    offset = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        message[offset : offset + size] = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        offset += _padded_bytes(tensor.shape, tensor.dtype)
    return message


def _unpack(message: Tensor, headers: Sequence[Header]) -> Iterator[Tensor]:
    offset = 0
    for shape, dtype in headers:
        yield message[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        offset += _padded_bytes(shape, dtype)
