"""The plan: how a job is computed on devices. It holds no tensor, no process group and no callable.

plan.mesh        ranks along each axis: dp tp pp cp ep
plan.data        how data ranks share the batch and reduce gradients
plan.tensor      how modules are cut over tp, and the sequence between them
plan.pipeline    where the stages of pp begin, and their schedule
plan.server      what a parameter server holds, and how far ranks may drift apart
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from echelon.plan import batch_split
from echelon.plan.codec import Document
from echelon.plan.mesh import Mesh
from echelon.plan.parameter_server import DEFAULT_MIN_ROWS, ServedTable
from echelon.plan.placement import Placement, ReplicatedModule
from echelon.plan.sequence_segment import SequenceSegment

#: fp8: matrix products of repeated blocks in fp8, the rest in bf16; forecast only.
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
BatchNorm = Literal["local", "sync"]
Recompute = Literal["none", "block", "selective"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
ExchangeMode = Literal["allreduce", "server"]
MAX_REPLICAS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan:
    """How the data ranks share the batch and exchange gradients."""

    batch_shares: tuple[int, ...] = ()  #: relative shares of the data ranks, larger on faster devices; empty: equal
    keep_gradients: bool = False  #: zero 2-3: reduce full gradients once per step instead of once per micro-batch
    #: zero 1-3: shard the model as one unit instead of block by block; required where the samples decide which blocks run.
    shard_as_one: bool = False
    bucket_megabytes: int = 25  #: zero=0: gradient megabytes per all-reduce

    def __post_init__(self) -> None:
        if any(type(share) is not int or share < 1 for share in self.batch_shares):
            raise ValueError(f"shares={':'.join(map(str, self.batch_shares))}: each share is an integer of at least 1")
        _require_positive("bucket", self.bucket_megabytes, "megabytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """How modules are cut over tp."""

    placements: tuple[Placement, ...] = ()
    replicated: tuple[ReplicatedModule, ...] = ()  #: modules with parameters that every rank of tp holds in full
    #: Sequence parallelism: between the cut modules (norms, dropouts, residuals) each rank holds its part of the sequence.
    sequence: bool = False
    segments: tuple[SequenceSegment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """How the model is cut into stages."""

    #: First unit of each stage but the first, in the order of the calls; interleaved schedules have several stages per rank.
    stages: tuple[int, ...] = ()
    schedule: Schedule = "1f1b"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """What a parameter server holds (exchange=server)."""

    dense: ExchangeMode = "allreduce"  #: how the parameters outside the served tables are exchanged
    staleness: int | None = 0  #: how many steps a rank may be ahead of the slowest; None: unbounded
    servers: int = 1
    replicas: int = 1  #: servers that hold each row
    min_table_rows: int = DEFAULT_MIN_ROWS  #: tables with fewer rows stay on the ranks
    tables: tuple[ServedTable, ...] = ()  #: the tables on the servers; empty: chosen by `min_table_rows`

    def __post_init__(self) -> None:
        if self.staleness is not None and (type(self.staleness) is not int or self.staleness < 0):
            values = "an integer number of steps, 0 for synchronous, or none for no bound"
            raise ValueError(f"staleness={self.staleness!r}: {values}")
        _require_positive("servers", self.servers)
        _require_positive("rows", self.min_table_rows)
        if type(self.replicas) is not int or not 1 <= self.replicas <= MAX_REPLICAS:
            raise ValueError(f"replicas={self.replicas!r}: each row is on 1 to {MAX_REPLICAS} servers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Document):
    """How to compute a job. The engine executes every field as written."""

    KIND: ClassVar[str] = "plan"
    VERSION: ClassVar[int] = 5

    mesh: Mesh = field(default_factory=Mesh)
    zero: int = 0  #: ZeRO stage: 0 replicated, 1 optimizer state sharded over dp, 2 gradients too, 3 parameters too
    micro: int | None = None  #: samples per micro-batch per data rank; None: the rank's whole share
    precision: Precision | None = None  #: None: the job's
    batchnorm: BatchNorm = "local"  #: batch statistics over each micro-batch ("local") or over the data ranks ("sync")
    #: What repeated blocks recompute in backward: nothing; everything; everything but matrix products and attention.
    recompute: Recompute = "none"
    compile: bool = False
    fused: bool = True  #: fused optimizer kernels, where torch has them
    threads: int | None = None  #: CPU threads per rank; None: cores / ranks on the node
    #: Gradients are summed over the ranks, or applied by a parameter server, which then holds the large tables.
    exchange: ExchangeMode = "allreduce"
    data: DataPlan = field(default_factory=DataPlan)
    tensor: TensorPlan = field(default_factory=TensorPlan)
    pipeline: PipelinePlan = field(default_factory=PipelinePlan)
    server: ServerPlan = field(default_factory=ServerPlan)
    model: str | None = None  #: fingerprint of the model this plan was made for; None: any

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero={self.zero!r}: a ZeRO stage is 0, 1, 2 or 3")
        for name, value in (("micro", self.micro), ("threads", self.threads)):
            if value is not None:
                _require_positive(name, value)
        shares = self.data.batch_shares
        if shares and len(shares) != self.mesh.dp:
            raise ValueError(f"shares={':'.join(map(str, shares))}: give one for each of dp={self.mesh.dp} data ranks")

    def replace(self, **changes: Any) -> Self:
        """A copy with other values; a field of a group goes by its own name: `plan.replace(zero=1, stages=(4,))`."""
        groups: dict[str, dict[str, Any]] = {}
        for name in [name for name in changes if name in GROUPS]:
            groups.setdefault(GROUPS[name], {})[name] = changes.pop(name)
        for group, values in groups.items():
            changes[group] = dataclasses.replace(changes.get(group, getattr(self, group)), **values)
        return dataclasses.replace(self, **changes)

    def get(self, name: str) -> Any:
        """The value of a field, of the plan or of one of its groups."""
        return getattr(getattr(self, GROUPS[name]) if name in GROUPS else self, name)

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
        """Whether it lacks the model's cuts, as the short form does."""
        lacks_placements = self.mesh.tp > 1 and not self.tensor.placements and not self.tensor.replicated
        lacks_segments = self.mesh.tp > 1 and self.tensor.sequence and not self.tensor.segments
        lacks_stages = self.mesh.pp > 1 and not self.pipeline.stages
        lacks_tables = self.uses_servers and not self.server.tables and self.model is None
        return lacks_placements or lacks_segments or lacks_stages or lacks_tables

    @property
    def uses_servers(self) -> bool:
        """Whether a parameter server holds part of the model."""
        return self.exchange == "server"

    @property
    def asynchronous(self) -> bool:
        """Whether ranks proceed independently: no sum over all ranks, no step that waits for all."""
        return self.uses_servers and self.server.dense == "server" and self.server.staleness != 0

    def split_batch(self, samples: int) -> list[list[batch_split.SampleRange]]:
        """The micro-batches of each data rank, as slices of a batch of `samples`."""
        return batch_split.split_batch(samples, self.mesh.dp, self.micro, self.data.batch_shares)

    def count_micro_batches(self, samples: int) -> int:
        """Micro-batches per data rank for a batch of `samples`."""
        return batch_split.count_micro_batches(samples, self.mesh.dp, self.micro, self.data.batch_shares)

    def __str__(self) -> str:
        """The short form: what differs from the defaults, and dp."""
        default = type(self)()
        words = [f"{axis}={size}" for axis, size in self.mesh.sizes.items() if axis == "dp" or size != 1]
        for word, name in VALUE_WORDS.items():
            value = self.get(name)
            if value != default.get(name):
                text = ":".join(map(str, value)) if isinstance(value, tuple) else "none" if value is None else value
                words.append(f"{word}={text}")
        return " ".join(words + [word for word, (name, value) in FLAG_WORDS.items() if self.get(name) == value])


#: Words of the short form that take a value, and their fields.
VALUE_WORDS = {
    "zero": "zero", "micro": "micro", "threads": "threads", "bucket": "bucket_megabytes", "servers": "servers", "replicas": "replicas",
    "rows": "min_table_rows", "precision": "precision", "batchnorm": "batchnorm", "schedule": "schedule", "recompute": "recompute",
    "exchange": "exchange", "dense": "dense", "staleness": "staleness", "shares": "batch_shares",
}  # fmt: skip
#: Words that stand alone -> (field, value).
FLAG_WORDS = {
    "keep": ("keep_gradients", True),
    "whole": ("shard_as_one", True),
    "sequence": ("sequence", True),
    "compile": ("compile", True),
    "unfused": ("fused", False),
}
#: field of a group -> group.
_GROUP_TYPES: dict[str, Any] = {"data": DataPlan, "tensor": TensorPlan, "pipeline": PipelinePlan, "server": ServerPlan}
GROUPS = {item.name: group for group, kind in _GROUP_TYPES.items() for item in dataclasses.fields(kind)}


def _require_positive(name: str, value: object, unit: str = "") -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: an integer{f' number of {unit}' if unit else ''} of at least 1")
