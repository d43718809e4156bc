"""The plan: how a job is computed on devices. It holds no tensor, no process group and no callable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from echelon.plan.codec import Document
from echelon.plan.mesh import Mesh
from echelon.plan.parameter_server import DEFAULT_MIN_ROWS, ServedTable
from echelon.plan.placement import Placement, ReplicatedModule
from echelon.plan.sequence_segment import SequenceSegment

#: fp8: products of repeated blocks in it, all else in bf16; it is forecast and not executed yet.
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
BatchNorm = Literal["local", "sync"]
Recompute = Literal["none", "block", "selective"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
ExchangeMode = Literal["allreduce", "server"]
#: A chain of more replicas is not made.
MAX_REPLICAS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Document):
    """How to compute a job. Every field is a decision that the engine executes as written."""

    KIND: ClassVar[str] = "plan"
    VERSION: ClassVar[int] = 4

    mesh: Mesh = field(default_factory=Mesh)
    #: 0 replicated, 1 optimizer state sharded over dp, 2 gradients too, 3 parameters too.
    zero: int = 0
    #: Samples per micro-batch per data rank; None: the rank's whole share at once.
    micro: int | None = None
    #: Of the batch, in proportion, what each data rank computes: more on faster devices. Empty: all the same.
    batch_shares: tuple[int, ...] = ()
    #: zero 2-3: keep full gradients between micro-batches and exchange once a step.
    keep_gradients: bool = False
    #: zero 1-3: shard the model as one unit, not block by block; needed where samples decide which blocks run.
    shard_as_one: bool = False
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
    bucket_megabytes: int = 25
    #: How gradients come together: summed over the ranks, or by way of a parameter server, which then holds the large tables.
    exchange: ExchangeMode = "allreduce"
    #: exchange=server: how the parameters go that are no tables of the server's.
    dense: ExchangeMode = "allreduce"
    #: exchange=server: how many steps a rank may be ahead of the slowest and still read rows; 0: all are in step, and one sum is applied;
    #: None: it never waits.
    staleness: int | None = 0
    servers: int = 1
    #: Servers that hold each row: what was acknowledged is lost only where all of them die together.
    replicas: int = 1
    #: exchange=server: a table with fewer rows stays with the ranks.
    min_table_rows: int = DEFAULT_MIN_ROWS
    #: What the servers hold; empty: found for this model.
    tables: tuple[ServedTable, ...] = ()
    #: How modules are cut over tp.
    placements: tuple[Placement, ...] = ()
    #: Modules with parameters that tp leaves whole.
    replicated: tuple[ReplicatedModule, ...] = ()
    #: Between the modules that tp cuts each rank has a part of the sequence only: norms, dropouts and residuals keep less.
    sequence: bool = False
    #: Where that is so.
    segments: tuple[SequenceSegment, ...] = ()
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
        if self.batch_shares and len(self.batch_shares) != self.mesh.dp:
            raise ValueError(
                f"shares={':'.join(map(str, self.batch_shares))}: one for each of dp={self.mesh.dp} data ranks"
            )
        if any(type(share) is not int or share < 1 for share in self.batch_shares):
            raise ValueError(f"shares={':'.join(map(str, self.batch_shares))}: whole numbers of at least 1")
        if self.staleness is not None and (type(self.staleness) is not int or self.staleness < 0):
            raise ValueError(
                f"staleness={self.staleness!r}: a whole number of steps, 0 for synchronous, or none for no bound"
            )
        for name, value in (("servers", self.servers), ("rows", self.min_table_rows)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: a whole number of at least 1")
        if type(self.replicas) is not int or not 1 <= self.replicas <= MAX_REPLICAS:
            raise ValueError(f"replicas={self.replicas!r}: each row is on 1 to {MAX_REPLICAS} servers")
        if type(self.bucket_megabytes) is not int or self.bucket_megabytes < 1:
            raise ValueError(f"bucket={self.bucket_megabytes!r}: a whole number of megabytes, at least 1")

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.mesh.ranks

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded at rest: a ZeRO stage, and ranks to shard over."""
        return self.zero > 0 and self.mesh.dp > 1

    @property
    def incomplete(self) -> bool:
        """Whether it leaves to be found how this model is cut: the short form does."""
        lacks_placements = self.mesh.tp > 1 and not self.placements and not self.replicated
        lacks_segments = self.mesh.tp > 1 and self.sequence and not self.segments
        return (
            lacks_placements
            or lacks_segments
            or (self.mesh.pp > 1 and not self.stages)
            or (self.uses_servers and not self.tables and self.model is None)
        )

    @property
    def uses_servers(self) -> bool:
        """Whether a parameter server holds some of the model."""
        return self.exchange == "server"

    @property
    def asynchronous(self) -> bool:
        """Whether ranks go on without each other: nothing is summed over them, and no step waits for all."""
        return self.uses_servers and self.dense == "server" and self.staleness != 0

    def __str__(self) -> str:
        from echelon.plan.text import to_text

        return to_text(self)
