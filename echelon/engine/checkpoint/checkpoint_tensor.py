"""How tensors of this rank appear in a checkpoint: under full names and in full coordinates, whatever plan runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from echelon.engine.parallel.shard_layout import ShardRegion, TPShard, full_tensor_shape, local_regions, to_local


def to_checkpoint_tensor(tensor: Tensor, tp_shard: TPShard | None) -> Tensor:
    """`tensor` for torch's planners: with its region of the full tensor if it is laid out as `tp_shard`."""
    if tp_shard is None or tensor.shape != tp_shard.local_shape:
        return tensor
    # No rank has a region of a tensor without elements.
    return CheckpointTensor(tensor, tp_shard) if tp_shard.full_shape.numel() else tensor.new_empty(tp_shard.full_shape)


class CheckpointTensor(Tensor):
    """A tensor for torch's distributed checkpoint: this rank's regions, in coordinates of the full tensor.

    torch calls the methods below on any tensor that has them (as DTensor does).
    """

    _regions: list[ShardRegion]

    @staticmethod
    def __new__(cls, tensor: Tensor, tp_shard: TPShard | None) -> CheckpointTensor:
        local_values = to_local(tensor)
        wrapper: CheckpointTensor = Tensor._make_wrapper_subclass(
            cls, full_tensor_shape(tensor, tp_shard), dtype=local_values.dtype, device=local_values.device
        )
        wrapper._regions = local_regions(tensor, tp_shard)
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(
            f"{func}: a tensor that is sharded over ranks can be saved and loaded, but not computed with"
        )

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(region.values), size=self.size()
                ),
            )
            for chunk, region in zip(self.__create_chunk_list__(), self._regions, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(region.offsets), region.values.shape) for region in self._regions]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(region.values for region in self._regions if torch.Size(region.offsets) == index.offset)
