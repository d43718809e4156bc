"""The profile: what one training step of a model computes, moves and saves.

Figures that depend on the micro-batch are an `Amount`: a fixed part and a part per sample, so that one profile prices every micro-batch.
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
#: See `OptimizerProfile.update_scope`.
UpdateScope = Literal["element", "tensor", "model"]

#: Bytes of one element, by torch's names without `torch.`.
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
    """One parameter; `aliases` are its other names."""

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
        """Bytes of the full tensor."""
        return self.elements * DTYPE_BYTES.get(self.dtype, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleProfile:
    """One module path; `blocks.*.up` stands for `count` identical modules. Figures are of one of them, children included, for one forward."""

    path: str
    kind: str
    count: int = 1
    parameters: int = 0  #: bytes
    flops: Amount = Amount()
    moved: Amount = Amount()
    saved: Amount = Amount()  #: for backward
    output: Amount = Amount()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator with one shape, and how often a step calls it.

    `dims` by `kind`: matmul (batch, m, n, k); convolution (samples, channels in, channels out, kernel elements, output elements, groups);
    attention (samples x heads, queries, keys, head dim), whose `flops` exclude masked scores; stream: priced by `moved`, channel-wise norms have
    (channels, elements of each, samples), row-wise operators (width, rows).
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
    """The dims that the rate of an operator depends on; a curve's points are at these."""
    if kind == "convolution":
        samples, in_channels, out_channels, kernel_elements, output_elements, groups = dims
        return in_channels / groups, out_channels / groups, kernel_elements, output_elements, samples
    return dims[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """A moment at which memory peaks for some micro-batch: what is alive besides parameters, gradients and optimizer state, and the bytes of
    gradients that are complete."""

    module: str
    phase: Phase
    alive: Amount
    saved: Amount  #: the part of `alive` that is saved for backward
    gradients: float
    blocks: int = 0  #: live tensors of a megabyte or more: allocators round each up
    operator: str = ""  #: the running operator, whose library may take a workspace, and the bytes it moves
    moved: Amount = Amount()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineUnit:
    """One call of a module that a pipeline does not split, in the order of forward's calls: a stage may begin at each."""

    path: str
    cost: float  #: relative to the others
    boundary_bytes: Amount = Amount()  #: received by a stage that begins here
    changes_buffers: bool = False  #: such as running statistics: all calls of the module must be on one stage


@dataclass(frozen=True, slots=True, kw_only=True)
class TableProfile:
    """An embedding table, which a parameter server may hold."""

    path: str  #: of the module (nn.Embedding, nn.EmbeddingBag)
    rows: int
    dim: int
    dtype: str = "float32"
    lookups: Amount = Amount()  #: ids per forward
    optimizer: str = ""  #: the optimizer that trains it
    unsupported_reason: str = ""  #: why no server can hold it, with a remedy; empty: one can

    @property
    def parameter_name(self) -> str:
        """Name of its weight."""
        return f"{self.path}.weight" if self.path else "weight"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dim * DTYPE_BYTES.get(self.dtype, 4)

    @property
    def bytes(self) -> int:
        """Bytes of the full table."""
        return self.rows * self.row_bytes

    def distinct_rows(self, samples: float) -> float:
        """Distinct rows that `samples` samples read if ids are uniform, which is an upper bound."""
        return self.rows * -math.expm1(-self.lookups.at(samples) / self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerProfile:
    """What an optimizer holds, allocates and reads."""

    name: str
    state_bytes: int  #: over all its parameters
    temporary_bytes: int  #: of one unfused step
    trainable_elements: int
    fused: bool = False  #: whether torch has a fused kernel for it
    fused_sharded: bool = False  #: and one for sharded parameters
    #: What the update of an element reads: its own gradient and state, its full parameter (a norm, factors), or several parameters.
    update_scope: UpdateScope = "element"
    uses_rng: bool = False  #: whether its step draws random numbers
    untested_reason: str = ""  #: why it could not be tested; its update_scope is "model" then

    def has_fused_kernel(self, *, sharded: bool) -> bool:
        """Whether a plan that asks for fused kernels gets one."""
        return self.fused_sharded if sharded else self.fused


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Document):
    """What a job computes, moves and saves, and how it can be cut."""

    KIND: ClassVar[str] = "profile"
    VERSION: ClassVar[int] = 10

    model: str  #: fingerprint: see `model_fingerprint`
    name: str
    batch: int
    precision: Precision
    device: str  #: that the operators were traced for: cpu or cuda
    parameters: tuple[ParameterProfile, ...]
    modules: tuple[ModuleProfile, ...]
    operators: tuple[Operator, ...]
    moments: tuple[MemorySnapshot, ...]
    optimizers: tuple[OptimizerProfile, ...]
    buffers: int = 0  #: bytes
    fsdp_units: tuple[str, ...] = ()
    fsdp_unit_bytes: tuple[int, ...] = ()  #: parameter bytes of each unit
    pipeline_units: tuple[PipelineUnit, ...] = ()  #: where a pipeline can be cut; empty: nowhere
    tables: tuple[TableProfile, ...] = ()
    samples_coupled: bool | None = False  #: whether samples interact other than through batch norms; None: unknown
    coupling_unknown_reason: str = ""
    batch_norms: tuple[str, ...] = ()  #: paths
    input_bytes: int = 0  #: per sample
    samples: int = 0  #: in the data set; 0: unknown
    unshardable_reason: str = ""  #: why the parameters cannot be sharded over data ranks
    varying_blocks_reason: str = ""  #: why ranks may run different blocks, and deadlock if sharded block by block
    clips_gradients: bool = False
    #: fake: nothing was run; real: the model cannot be traced, so that a small step was run; see `notes`.
    traced: Literal["fake", "real"] = "fake"
    notes: tuple[str, ...] = ()
    graph_hash: str = ""  #: hash of the traced operators: name, module, phase, shapes of each, in order

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch={self.batch}: the global batch holds at least one sample")
        if len(self.fsdp_units) != len(self.fsdp_unit_bytes):
            raise ValueError(f"{len(self.fsdp_units)} fsdp_units but {len(self.fsdp_unit_bytes)} fsdp_unit_bytes")
        if not self.moments:
            raise ValueError("moments: a step has at least one")
        reason = self.coupling_unknown_reason
        if (self.samples_coupled is None) != bool(reason):
            raise ValueError(f"samples_coupled={self.samples_coupled}, coupling_unknown_reason={reason!r} contradict")

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
        """FLOPs of a micro-batch of `samples`: forward, backward, or both."""
        operators = (operator for operator in self.operators if phase in (None, operator.phase))
        return sum(operator.count * operator.flops.at(samples) for operator in operators)

    def saved_bytes(self, samples: float) -> float:
        """Bytes that a micro-batch of `samples` saves for backward."""
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
    """The module paths that ZeRO shards as one: the repeated blocks of the outermost lists. The root holds the rest.

    `tree` is (path, class name, identity -> bytes of its own parameters) for every path of the model, including those of shared modules.
    A block is a child with a number for a name (ModuleList and Sequential name them so) that has a sibling of its class. Blocks below a
    thousandth of the model are left to the root, because a collective of their own would cost more than it saves, and so are blocks that
    share a parameter with modules outside.
    """
    subtree_bytes: Counter[str] = Counter()
    class_counts: Counter[tuple[str, str]] = Counter()
    use_counts = Counter(key for _, _, own_parameters in tree for key in own_parameters)
    for path, class_name, own_parameters in tree:
        parts = path.split(".") if path else []
        for depth in range(len(parts) + 1):
            subtree_bytes[".".join(parts[:depth])] += sum(own_parameters.values())
        class_counts[path.rpartition(".")[0], class_name] += path.rpartition(".")[2].isdigit()
    fsdp_units: list[str] = []
    for path, class_name, _ in tree:
        parent, _, child_name = path.rpartition(".")
        is_block = child_name.isdigit() and class_counts[parent, class_name] > 1
        is_large_enough = subtree_bytes[path] * 1000 >= max(subtree_bytes[""], 1)
        if is_block and is_large_enough and not any(path.startswith(outer + ".") for outer in fsdp_units):
            fsdp_units.append(path)
    return tuple(path for path in fsdp_units if not _shares_parameters(path, tree, use_counts))


def _shares_parameters(unit: str, tree: Sequence[tuple[str, str, Mapping[int, int]]], use_counts: Counter[int]) -> bool:
    """Whether a parameter of `unit` is also used outside it."""
    inner_uses = Counter(key for path, _, own_parameters in tree if is_within(path, unit) for key in own_parameters)
    return any(use_counts[key] > count for key, count in inner_uses.items())
