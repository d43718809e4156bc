"""The plan: how a job is computed on devices. It holds no tensor, no process group and no callable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from echelon.plan.codec import Document
from echelon.plan.mesh import Mesh
from echelon.plan.placement import Placement, Uncut
from echelon.plan.segment import Segment

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
BatchNorm = Literal["local", "sync"]
Recompute = Literal["none", "block", "selective"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Document):
    """How to compute a job. Every field is a decision that the engine executes as written."""

    KIND: ClassVar[str] = "plan"
    VERSION: ClassVar[int] = 3

    mesh: Mesh = field(default_factory=Mesh)
    #: 0 replicated, 1 optimizer state sharded over dp, 2 gradients too, 3 parameters too.
    zero: int = 0
    #: Samples per micro-batch per data rank; None: the rank's whole share at once.
    micro: int | None = None
    #: Of the batch, in proportion, what each data rank computes: more on faster devices. Empty: all the same.
    shares: tuple[int, ...] = ()
    #: zero 2-3: keep full gradients between micro-batches and exchange once a step.
    keep_gradients: bool = False
    #: zero 1-3: shard the model as one unit, not block by block; needed where samples decide which blocks run.
    whole: bool = False
    #: None: the job's.
    precision: Precision | None = None
    #: Batch statistics: each micro-batch its own ("local"), or over the data ranks ("sync").
    batchnorm: BatchNorm = "local"
    #: Activations of repeated blocks: kept; computed again in backward from the block's input; or from that and its products' outputs.
    recompute: Recompute = "none"
    compile: bool = False
    #: Fused optimizer kernels where torch has them.
    fused: bool = True
    #: CPU threads per rank; None: cores / ranks on the node.
    threads: int | None = None
    #: Megabytes of gradient that one exchange carries (zero=0).
    bucket: int = 25
    #: How modules are cut over tp.
    placements: tuple[Placement, ...] = ()
    #: Modules with parameters that tp leaves whole.
    uncut: tuple[Uncut, ...] = ()
    #: Between the modules that tp cuts each rank has a part of the sequence only: norms, dropouts and residuals keep less.
    sequence: bool = False
    #: Where that is so.
    segments: tuple[Segment, ...] = ()
    #: Where the stages of pp after the first begin, in units in the order of their calls; several per rank under interleaved schedules.
    stages: tuple[int, ...] = ()
    schedule: Schedule = "1f1b"
    #: Fingerprint of the model this plan was made for; None: any.
    model: str | None = None

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero={self.zero!r}: a ZeRO stage is 0, 1, 2 or 3")
        for name in ("micro", "threads"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r}: a whole number of at least 1")
        if self.shares and len(self.shares) != self.mesh.dp:
            raise ValueError(f"shares={':'.join(map(str, self.shares))}: one for each of dp={self.mesh.dp} data ranks")
        if any(type(share) is not int or share < 1 for share in self.shares):
            raise ValueError(f"shares={':'.join(map(str, self.shares))}: whole numbers of at least 1")
        if type(self.bucket) is not int or self.bucket < 1:
            raise ValueError(f"bucket={self.bucket!r}: a whole number of megabytes, at least 1")

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.mesh.ranks

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded at rest: a ZeRO stage, and ranks to shard over."""
        return self.zero > 0 and self.mesh.dp > 1

    @property
    def open(self) -> bool:
        """Whether it leaves to be found how this model is cut: the short form does."""
        cuts = self.mesh.tp > 1 and not self.placements and not self.uncut
        parts = self.mesh.tp > 1 and self.sequence and not self.segments
        return cuts or parts or (self.mesh.pp > 1 and not self.stages)

    def __str__(self) -> str:
        from echelon.plan.text import to_text

        return to_text(self)
