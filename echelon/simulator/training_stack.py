"""Properties of a training system that a plan does not describe, so that runs of other systems can be forecast too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StackRecompute = Literal["plan", "attention", "ops", "alternate"]
AttentionKernel = Literal["flash1", "flash2", "cudnn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStack:
    """The defaults describe echelon's own engine."""

    #: Ranks per ZeRO sharding group; None: all of dp.
    shard_group_size: int | None = None
    #: plan: by the plan. attention: scores and softmax only. ops: keep every second product. alternate: every second block.
    recompute: StackRecompute = "plan"
    #: Whether recomputing a block stops at the last operator that backward needs.
    stops_recompute_early: bool = True
    #: Precision of products in repeated blocks, whatever the plan's is.
    block_precision: Literal["fp8", "fp4"] | None = None
    #: Whether their operands are read once more to find the maximum that sets the scale.
    scans_for_scale: bool = False
    #: Bytes of a parameter in ZeRO's all-gathers; None: its own width.
    gather_width: int | None = None
    #: Bytes of a block parameter between steps, unless zero=3 shards it; None: as traced.
    parameter_width: int | None = None
    #: Chunks of the model per rank of pp; None: the schedule's default.
    chunks: int | None = None
    #: The kernel of fused attention.
    attention_kernel: AttentionKernel = "flash2"
    #: Whether 2-byte parameters have 4-byte master weights and optimizer states.
    master_weights: bool = False
    #: Whether under zero 1-2 a rank keeps its shard in addition to the gathered parameters.
    keeps_shards: bool = True
    #: Bytes of an element of accumulated gradients; None: as wide as parameters.
    gradient_width: int | None = None
    #: Bytes of an element of gradients in messages; None: as wide as parameters.
    message_width: int | None = None
    #: Whether gradients are freed after each step, so that without accumulation they exist only once backward has reached them.
    frees_gradients: bool = True
    #: Copies of one ZeRO unit's gradients at once: as computed, as sent, and the previous unit's.
    gradient_copies: int = 3
    #: Whether exchanges of the data ranks overlap with computation.
    overlaps_data_parallel: bool = True
    #: Whether they do so in pipelines too, during the last micro-batch's backward.
    overlaps_in_pipeline: bool = False
    #: Whether collectives of tp overlap with the products that they feed.
    overlaps_tensor_parallel: bool = False

    def __post_init__(self) -> None:
        if self.shard_group_size is not None and self.shard_group_size < 1:
            raise ValueError(f"shard_group_size={self.shard_group_size}: must be at least 1")
        if self.chunks is not None and self.chunks < 1:
            raise ValueError(f"chunks={self.chunks}: must be at least 1")
