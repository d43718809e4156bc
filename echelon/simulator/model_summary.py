"""A model as a cluster's forecast needs it: one repeated block, what comes before the blocks, and what comes after them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from echelon.plan.plan import Precision
from echelon.plan.profile import WIDTH, Phase, Reads

#: Precisions in which what passes from operator to operator has 2 bytes.
_HALF = ("bf16", "fp16", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """Operators that are alike, as one block (or the part outside of blocks) runs them."""

    kind: Literal["product", "inner", "attention", "convolution", "stream"]
    phase: Phase
    dtype: str
    count: float
    dims: tuple[tuple[float, float], ...]  #: (fixed, per sample)
    flops: tuple[float, float]
    moved: tuple[float, float]
    core: bool  #: part of attention between its projections
    cut: bool  #: divided by tp
    lies: str = ""  #: of a product, which factors lie transposed in memory: `nt`
    expert: bool = (
        False  #: one of a block's experts does it, or all of them: ep divides them, and each gets the rows of ep ranks
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Bytes per sample that one block, or what is outside of blocks, keeps for backward."""

    cut: float = 0.0  #: of what tp divides
    whole: float = 0.0
    core: float = 0.0  #: of attention between its projections; part of `cut`
    products: float = 0.0  #: outputs of products and attention; tp divides about all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A visit: a place where a stage may begin. Over all places `blocks` and `elements` add up to the number of blocks."""

    blocks: float  #: what it computes, in blocks
    elements: float  #: parameters of blocks that it holds, in blocks
    crossing: float  #: bytes per sample that pass to a stage that begins here


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The model. Figures of `block` are of one; `before` and `after` are what a pipeline's first and last rank do besides."""

    layers: int
    before: tuple[Op, ...]
    block: tuple[Op, ...]
    after: tuple[Op, ...]
    elements: tuple[float, float, float]  #: parameters before the blocks, in one block, after them
    whole: tuple[float, float, float]  #: of these, what tp leaves whole on every rank
    tied: float  #: of those before, what is used after the blocks too
    width: int  #: bytes of one parameter as traced
    precision: Precision  #: as traced
    state: float  #: bytes of the optimizer's state for one parameter
    trained: float  #: share of the parameters that is trained
    clip: bool  #: whether gradients are clipped
    kept: Kept
    outside: tuple[float, float]  #: bytes per sample kept before and after the blocks
    given: float  #: bytes per sample that one block passes to the next
    keys: float  #: bytes per sample of one block's keys and values
    loss: float  #: bytes per sample alive at the loss beside what is kept anywhere
    parted: bool  #: whether tp divides the loss
    sums: float  #: how often ranks of tp add up in one pass of a block
    working: float  #: bytes per sample that the largest operator of a block reads and writes: alive while it runs
    inputs: float  #: bytes per sample that come from the data
    experts: float = 0.0  #: of one block's parameters, those of experts: ep divides them
    number: int = 0  #: of experts in a block
    tensors: tuple[float, float, float] = (0.0, 0.0, 0.0)  #: how many parameters there are, as `elements`
    routed: float = 0.0  #: bytes per sample that go to one block's experts, and come back
    places: tuple[Place, ...] = ()  #: empty: not known
    #: Optimizers that read more than each number by itself: share of the trained parameters, what they read, whether they draw.
    across: tuple[tuple[float, Reads, bool], ...] = ()

    def held(self, part: int, tp: int) -> float:
        """Parameters that a rank of tp holds: 0 before the blocks, 1 of one block, 2 after them."""
        return (self.elements[part] - self.whole[part]) / tp + self.whole[part]

    @property
    def scores(self) -> float:
        """Bytes per sample that one block keeps of written-out attention. What its projections gave, about three times what the block
        gives, is kept by any attention."""
        written = any(op.kind == "inner" for op in self.block)
        return max(self.kept.core - 3 * self.given, 0.0) if written else 0.0


def recast(work: Work, precision: Precision | None) -> Work:
    """The work in another precision than it was traced in: products, and about all that lies between them, are as wide as that says.

    Under fp8 what lies between products is as wide as under bf16; how products are then computed is priced where they are.
    """
    half = precision in _HALF
    if precision is None or half == (work.precision in _HALF):
        return work if precision in (None, work.precision) else replace(work, precision=precision)
    traced, wanted = ("float32", "bfloat16") if half else ("bfloat16", "float32")
    products = [op for op in work.block if op.kind != "stream"]
    # A model that was built narrow is so in any precision.
    if not products or (WIDTH.get(products[0].dtype, 4) <= 2) == half:
        return replace(work, precision=precision)
    times = WIDTH[wanted] / WIDTH[traced]

    def changed(ops: tuple[Op, ...]) -> tuple[Op, ...]:
        return tuple(
            replace(op, dtype=wanted, moved=(op.moved[0] * times, op.moved[1] * times))
            if (WIDTH.get(op.dtype, 4) <= 2) != half
            else op
            for op in ops
        )

    kept = work.kept
    return replace(
        work,
        before=changed(work.before), block=changed(work.block), after=changed(work.after), precision=precision,
        kept=replace(kept, cut=kept.cut * times, whole=kept.whole * times, core=kept.core * times, products=kept.products * times),
        outside=(work.outside[0] * times, work.outside[1] * times),
        places=tuple(replace(each, crossing=each.crossing * times) for each in work.places),
        **{name: getattr(work, name) * times for name in ("given", "keys", "loss", "working", "routed")},
    )  # fmt: skip
