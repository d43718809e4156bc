"""The profile: what one training step of a model computes, moves and keeps, for any number of samples.

Every figure that depends on how many samples are computed together is an `Amount`: a fixed part and a part per
sample, so that one profile prices every micro-batch.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

from echelon.plan.codec import Document
from echelon.plan.plan import Precision

Phase = Literal["forward", "backward"]
#: What an optimizer's update of one number reads: see `OptimizerProfile.update_scope`.
UpdateScope = Literal["element", "tensor", "model"]

#: Bytes of one element; names as torch prints them without `torch.`.
DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Amount:
    """A figure at a micro-batch of n samples: `fixed + per_sample * n`."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, samples: float) -> float:
        """The figure for `samples` samples, never below zero."""
        return max(self.fixed + self.per_sample * samples, 0.0)

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.fixed + other.fixed, self.per_sample + other.per_sample)

    def __mul__(self, times: float) -> Amount:
        return Amount(self.fixed * times, self.per_sample * times)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterProfile:
    """One tensor that is trained or held fixed; `aliases` are the other names that share it."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.elements * DTYPE_BYTES.get(self.dtype, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleProfile:
    """One module path; `blocks.*.up` stands for `count` modules that are alike. Figures are of one of them, children
    included, for one forward (and `saved`: what its forward leaves for backward)."""

    path: str
    kind: str
    count: int = 1
    parameters: int = 0  #: bytes
    flops: Amount = Amount()
    moved: Amount = Amount()
    saved: Amount = Amount()
    output: Amount = Amount()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One kind of call with one kind of shape, and how often a step makes it.

    `dims` by `kind`: matmul (batch, m, n, k); convolution (samples, channels in, channels out, kernel elements, output elements,
    groups); attention (samples x heads, queries, keys, head dim), of which `flops` leave out scores that are never computed;
    stream: priced by `moved`; norms over channels (channels, elements of each, samples), and what goes row by row (width, rows).
    """

    name: str  #: as torch names it: "addmm", "convolution_backward"
    kind: Literal["matmul", "convolution", "attention", "stream"]
    phase: Phase
    module: str  #: folded path of the module that calls it
    dtype: str = "float32"
    count: int = 1
    dims: tuple[Amount, ...] = ()
    flops: Amount = Amount()
    moved: Amount = Amount()  #: bytes read and written


def rate_dims(kind: str, dims: tuple[float, ...]) -> tuple[float, ...]:
    """What the rate of an operator of this kind depends on; a curve's points are at these."""
    if kind == "convolution":
        samples, in_channels, out_channels, kernel_elements, output_elements, groups = dims
        return in_channels / groups, out_channels / groups, kernel_elements, output_elements, samples
    return dims[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """A moment of the step at which the memory may peak: what is alive besides parameters, gradients and optimizer state,
    and how many bytes of gradients are done by then. Only moments that are the peak for some micro-batch are kept."""

    module: str
    phase: Phase
    alive: Amount
    saved: Amount  #: the part of `alive` that waits for backward
    gradients: float
    blocks: int = 0  #: tensors of a megabyte or more among `alive`: allocators round each up
    operator: str = ""  #: what runs at that moment, and the bytes it moves: its library may take a workspace
    moved: Amount = Amount()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineUnit:
    """One call of a module that a pipeline does not cut in two, in the order of forward's calls: a stage may begin at each."""

    path: str
    cost: float  #: about what it costs beside the others
    boundary_bytes: Amount = Amount()  #: bytes that would pass to a stage that begins here, from those before
    changes_buffers: bool = (
        False  #: it changes a buffer (running statistics), so that its module must be called on one stage only
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableProfile:
    """A table of rows that are read by id: a parameter server may hold it."""

    path: str  #: of the module (nn.Embedding, nn.EmbeddingBag)
    rows: int
    dim: int
    dtype: str = "float32"
    lookups: Amount = Amount()  #: ids that one forward reads
    optimizer: str = ""  #: the optimizer that trains it
    #: Why no server can hold it, with what to do; empty: one can.
    unsupported_reason: str = ""

    @property
    def parameter_name(self) -> str:
        """Of the parameter."""
        return f"{self.path}.weight" if self.path else "weight"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dim * DTYPE_BYTES.get(self.dtype, 4)

    @property
    def bytes(self) -> int:
        """Bytes of the whole table."""
        return self.rows * self.row_bytes

    def distinct_rows(self, samples: float) -> float:
        """Rows that so many samples read, each counted once. Ids are taken as drawn evenly, which is the most that it can be."""
        return self.rows * -math.expm1(-self.lookups.at(samples) / self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerProfile:
    """What the optimizer costs: its state and what a step makes on the side."""

    name: str
    state_bytes: int  #: bytes, over all trainable parameters
    temporary_bytes: int  #: bytes that one unfused step makes besides
    trainable_elements: int  #: trainable elements
    fused: bool = False  #: whether torch has a fused kernel for it
    fused_sharded: bool = False  #: and one that takes sharded parameters
    #: What the update of a number reads: that number's own gradient and state, its whole parameter (a norm, factors), or several parameters.
    update_scope: UpdateScope = "element"
    uses_rng: bool = False  #: whether its step draws random numbers
    #: Why it could not be tried; it counts as `reads="model"` then.
    untested_reason: str = ""

    def has_fused_kernel(self, *, sharded: bool) -> bool:
        """Whether a plan that asks for fused kernels gets one."""
        return self.fused_sharded if sharded else self.fused


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Document):
    """What a job computes, moves and keeps, and how it can be cut."""

    KIND: ClassVar[str] = "profile"
    VERSION: ClassVar[int] = 10

    model: str  #: fingerprint: see `model_fingerprint`
    name: str
    batch: int
    precision: Precision
    device: str  #: kind of device that the operators were traced for: cpu or cuda
    parameters: tuple[ParameterProfile, ...]
    modules: tuple[ModuleProfile, ...]
    operators: tuple[Operator, ...]
    moments: tuple[MemorySnapshot, ...]
    optimizers: tuple[OptimizerProfile, ...]
    buffers: int = 0  #: bytes
    fsdp_units: tuple[str, ...] = ()
    fsdp_unit_bytes: tuple[int, ...] = ()  #: parameter bytes of each unit
    #: Where a pipeline can be cut; empty: nowhere.
    pipeline_units: tuple[PipelineUnit, ...] = ()
    tables: tuple[TableProfile, ...] = ()
    #: Whether the gradient of one sample depends on the others of its batch other than through batch norms (contrastive losses).
    #: None: not known, for the reason in `coupling_unknown_reason`.
    samples_coupled: bool | None = False
    coupling_unknown_reason: str = ""
    #: Paths of batch norms, the coupling that `batchnorm=` decides on.
    batch_norms: tuple[str, ...] = ()
    input_bytes: int = 0  #: per sample
    samples: int = 0  #: in the data set; 0: unknown
    #: Why torch cannot shard the parameters over data ranks; empty: it can as far as is known.
    unshardable_reason: str = ""
    #: Why ranks may run different blocks, and sharded block by block would wait for each other for ever; empty: they do not.
    varying_blocks_reason: str = ""
    clips_gradients: bool = False  #: whether gradients are clipped
    #: fake: nothing was run; real: the model cannot be traced and one small step was run; see `notes`.
    traced: Literal["fake", "real"] = "fake"
    notes: tuple[str, ...] = ()
    #: Hash of the traced operators: name, module, phase, shapes of each, in order.
    graph_hash: str = ""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch={self.batch}: the global batch holds at least one sample")
        if len(self.fsdp_units) != len(self.fsdp_unit_bytes):
            raise ValueError(f"{len(self.fsdp_units)} units but {len(self.fsdp_unit_bytes)} unit_bytes")
        if not self.moments:
            raise ValueError("moments: a step has at least one")
        if (self.samples_coupled is None) != bool(self.coupling_unknown_reason):
            raise ValueError(
                f"coupled={self.samples_coupled} and uncompared={self.coupling_unknown_reason!r}: the reason belongs to what is not known"
            )

    @property
    def elements(self) -> int:
        """Number of parameter elements, shared ones counted once."""
        return sum(parameter.elements for parameter in self.parameters)

    @property
    def bytes(self) -> int:
        """Bytes of all parameters, shared ones counted once."""
        return sum(parameter.bytes for parameter in self.parameters)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one full set of gradients."""
        return sum(parameter.bytes for parameter in self.parameters if parameter.trainable)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizers' state."""
        return sum(optimizer.state_bytes for optimizer in self.optimizers)

    def flops(self, samples: float, phase: Phase | None = None) -> float:
        """FLOPs of one micro-batch of `samples`: forward, backward, or both."""
        return sum(
            operator.count * operator.flops.at(samples)
            for operator in self.operators
            if phase in (None, operator.phase)
        )

    def saved_bytes(self, samples: float) -> float:
        """Bytes that a micro-batch of `samples` keeps for backward."""
        return max(snapshot.saved.at(samples) for snapshot in self.moments)


@lru_cache(maxsize=1 << 14)
def fold_path(path: str) -> str:
    """`blocks.3.up` as `blocks.*.up`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def is_within(path: str, module: str) -> bool:
    """Whether `path` is that module or inside it."""
    return path == module or path.startswith(f"{module}.")


def model_fingerprint(parameters: Iterable[tuple[str, Sequence[int], str]]) -> str:
    """Hash of (name, shape, dtype) in the model's order: equal for models that can hold each other's weights."""
    lines = "\n".join(f"{name} {tuple(shape)} torch.{dtype}" for name, shape, dtype in parameters)
    return hashlib.sha256(lines.encode()).hexdigest()


def find_fsdp_units(tree: Sequence[tuple[str, str, Mapping[int, int]]]) -> tuple[str, ...]:
    """The module paths that ZeRO shards as one: the repeated blocks of the outermost lists, root aside (it holds the rest).

    `tree` is (path, class name, identity -> bytes of its own parameters) for every path of the model, those of shared modules
    too. A block is a child with a number for a name (ModuleList and Sequential name them so) that has a sibling of its class.
    One that holds less than a thousandth of the model is left to the root: a collective of its own would cost more than it
    saves. So is one that shares a parameter with what is outside it: gathered in two places it would come apart.
    """
    subtree_bytes: Counter[str] = Counter()
    class_counts: Counter[tuple[str, str]] = Counter()
    for path, class_name, own_parameters in tree:
        for prefix in _path_prefixes(path):
            subtree_bytes[prefix] += sum(own_parameters.values())
        class_counts[path.rpartition(".")[0], class_name] += path.rpartition(".")[2].isdigit()
    fsdp_units: list[str] = []
    for path, class_name, _ in tree:
        parent, _, child_name = path.rpartition(".")
        if (
            not child_name.isdigit()
            or class_counts[parent, class_name] < 2
            or subtree_bytes[path] * 1000 < max(subtree_bytes[""], 1)
        ):
            continue
        if not any(path.startswith(outer + ".") for outer in fsdp_units):
            fsdp_units.append(path)
    use_counts = Counter(key for _, _, own_parameters in tree for key in own_parameters)
    return tuple(path for path in fsdp_units if not _shares_parameters(path, tree, use_counts))


def _path_prefixes(path: str) -> list[str]:
    """The path and all that it lies in, the root's empty one included."""
    parts = path.split(".") if path else []
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]


def _shares_parameters(unit: str, tree: Sequence[tuple[str, str, Mapping[int, int]]], use_counts: Counter[int]) -> bool:
    """Whether a parameter of `unit` is also used outside it."""
    inner_uses = Counter(key for path, _, own_parameters in tree if is_within(path, unit) for key in own_parameters)
    return any(use_counts[key] > count for key, count in inner_uses.items())
