"""What a training stack does that a plan of echelon does not say, so that runs of other stacks can be forecast too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StackRecompute = Literal["plan", "attention", "ops", "alternate"]
AttentionKernel = Literal["flash1", "flash2", "cudnn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStack:
    """The defaults are what echelon's own engine does."""

    #: Ranks of one sharding group of ZeRO; None: all of dp.
    shard_group_size: int | None = None
    #: plan: as the plan says. attention: scores and softmax only. ops: every second product is kept. alternate: every second block.
    recompute: StackRecompute = "plan"
    #: Whether the forward of a block is recomputed only as far as backward needs it, or to its end.
    stops_recompute_early: bool = True
    #: Products of repeated blocks in this precision, whatever the plan's is.
    block_precision: Literal["fp8", "fp4"] | None = None
    #: Whether their factors are read once more before, for the largest number that decides their scale.
    scans_for_scale: bool = False
    #: Bytes of one parameter where ZeRO fetches it; None: as wide as it is.
    gather_width: int | None = None
    #: Bytes of one parameter of blocks as it is held between steps, where no zero=3 divides it; None: as traced.
    parameter_width: int | None = None
    #: Chunks of the model on each rank of pp; None: the schedule's own number.
    chunks: int | None = None
    #: Which kernel a fused attention is.
    attention_kernel: AttentionKernel = "flash2"
    #: Whether parameters of 2 bytes have a master copy of 4 and optimizer states of 4 bytes.
    master_weights: bool = False
    #: Whether under zero 1-2 a rank's shard lies beside the parameters that were gathered from it.
    keeps_shards: bool = True
    #: Bytes of one number of the gradients that are kept between micro-batches; None: as wide as parameters.
    gradient_width: int | None = None
    #: Bytes of one number of the gradients in messages; None: as wide as parameters.
    message_width: int | None = None
    #: Whether gradients are freed after each step: then they exist only as far as backward has got, unless they are accumulated.
    frees_gradients: bool = True
    #: Copies of the gradients of one unit of ZeRO that exist at once: as computed, as sent, and those of the unit before.
    gradient_copies: int = 3
    #: Whether exchanges of the data ranks run beside compute.
    overlaps_data_parallel: bool = True
    #: Whether they do so in pipelines too: beside the last micro-batch's backward.
    overlaps_in_pipeline: bool = False
    #: Whether collectives of tp run beside the products that they feed.
    overlaps_tensor_parallel: bool = False

    def __post_init__(self) -> None:
        if self.shard_group_size is not None and self.shard_group_size < 1:
            raise ValueError(f"scope={self.shard_group_size}: a sharding group has at least one rank")
        if self.chunks is not None and self.chunks < 1:
            raise ValueError(f"chunks={self.chunks}: a rank has at least one chunk of the model")
