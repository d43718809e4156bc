"""What a server holds, as frozen nouns: sparse tables, dense parameters, the rules that update them, their first values.

Kinds of number, on the wire and in memory: f8, f4, f2 (floats of that many bytes), i2, i1 (integers with a scale per row).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from echelon.errors import DocumentError, ServerError
from echelon.plan.codec import from_plain, to_plain

#: Elements of a dense parameter's block: 256 KiB of fp32, so that a frame of one is large and a copy of one is short.
BLOCK_SIZE = 65536
#: Bytes per element of each kind of number.
DTYPE_BYTES = {"f8": 8, "f4": 4, "f2": 2, "i2": 2, "i1": 1}
RULE_KINDS = ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "lamb")
#: Rules whose updates without a gradient can be made up for later.
LAZY_RULE_KINDS = ("sgd", "momentum", "adagrad", "adam")
INIT_KINDS = ("zeros", "constant", "uniform", "normal")
_DEFAULT_EPS = {"adagrad": 1e-10, "rowwise_adagrad": 1e-10, "adam": 1e-8, "lamb": 1e-6}


class StoreError(ServerError):
    """A table, block or value that a server's store cannot take."""


class StoreFull(StoreError):  # noqa: N818 (a state; its base says error)
    """No room for what a push would create. Nothing of it was applied."""


def check_learning_rate(name: str, lr: Any) -> None:
    """Whether a push may bring this learning rate; None: the rule's own."""
    if lr is None:
        return
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not -1e300 < lr < 1e300:
        raise StoreError(f"{name}: a rate of {lr!r}; use a finite number below 1e300")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a gradient changes weights: torch.optim's formulas of the same names.

    In tables only the rows that a push names are touched, their decay and momentum too (as torch.optim.SparseAdam does it); with `every`
    each push that names the table is an update of all of its rows, which have no gradient but for those that it names (torch.optim.Adam).
    `steps`: whether adam and lamb correct their bias by how often the row (or block) was updated, or by the step that the push gives.
    """

    kind: Literal["sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "lamb"] = "adagrad"
    lr: float = 0.01
    weight_decay: float = 0.0
    #: adam: AdamW's decay of the weights instead of one that goes through the gradient.
    decoupled: bool = False
    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    #: None: as torch.optim has it for that kind.
    eps: float | None = None
    #: The accumulators' first value, of adagrad and rowwise_adagrad.
    initial: float = 0.0
    steps: Literal["row", "given"] = "row"
    #: Of tables: also rows without a gradient move (store.lazy_updates).
    every: bool = False

    def __post_init__(self) -> None:
        if self.kind not in RULE_KINDS:
            raise StoreError(f"rule.kind: {self.kind!r} is not a rule; use one of {', '.join(RULE_KINDS)}")
        for name in ("lr", "weight_decay", "dampening", "initial"):
            _check_number(f"rule.{name}", getattr(self, name), minimum=0.0)
        for name in ("momentum", "beta1", "beta2"):
            _check_number(f"rule.{name}", getattr(self, name), minimum=0.0, upper_bound=1.0)
        if self.eps is not None:
            _check_number("rule.eps", self.eps, minimum=0.0)
        if self.steps not in ("row", "given"):
            raise StoreError(
                f"rule.steps: {self.steps!r}; use 'row' (each row's own count) or 'given' (the push's step)"
            )
        if self.nesterov and (self.kind != "momentum" or self.momentum == 0 or self.dampening != 0):
            raise StoreError("rule.nesterov: needs kind='momentum', a momentum above 0 and no dampening")
        if self.decoupled and self.kind != "adam":
            raise StoreError(f"rule.decoupled: is for adam, not for {self.kind}; leave it out")
        if self.every and (self.kind not in LAZY_RULE_KINDS or self.steps != "row"):
            raise StoreError(
                f"rule.every: is for {', '.join(LAZY_RULE_KINDS)}, whose steps it counts itself, not for {self.kind} with steps={self.steps!r}; leave "
                "one of them out"
            )

    @property
    def replays_each_update(self) -> bool:
        """Whether updates that a row missed have to be computed one by one."""
        coupled = self.kind == "adagrad" or (self.kind == "adam" and not self.decoupled)
        return self.every and coupled and self.weight_decay != 0

    @property
    def epsilon(self) -> float:
        """What keeps the division finite."""
        return _DEFAULT_EPS.get(self.kind, 0.0) if self.eps is None else self.eps


@dataclass(frozen=True, slots=True, kw_only=True)
class Init:
    """First values by (name, seed, id, column): any server makes the same row, in f8 and, rounded, in f4.

    uniform: in value ± scale; normal: mean `value`, deviation `scale`; constant: `value`.
    """

    kind: Literal["zeros", "constant", "uniform", "normal"] = "uniform"
    scale: float = 0.01
    value: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in INIT_KINDS:
            raise StoreError(f"init.kind: {self.kind!r} is not an initialiser; use one of {', '.join(INIT_KINDS)}")
        _check_number("init.scale", self.scale, minimum=0.0)
        _check_number("init.value", self.value)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise StoreError(f"init.seed: {self.seed!r}; use an integer from 0 to 2**63 - 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A sparse table: rows of `dim` numbers by any 64-bit id, made when first pushed to.

    `dtype`: of state and arithmetic; `stored`: of the rows' weights in memory. `admit`: the push that creates a row is the
    admit-th to its id; the gradients of those before are dropped.
    """

    name: str
    dim: int
    rule: Rule = field(default_factory=Rule)
    init: Init = field(default_factory=Init)
    dtype: Literal["f4", "f8"] = "f4"
    stored: Literal["f4", "f8", "f2", "i2", "i1"] = "f4"
    admit: int = 1

    def __post_init__(self) -> None:
        _check_name("table", self.name)
        _check_integer(f"{self.name}.dim", self.dim, 1, 65536)
        _check_integer(f"{self.name}.admit", self.admit, 1, 2**31)
        _check_dtype(self.name, self.dtype)
        if self.stored not in DTYPE_BYTES:
            raise StoreError(
                f"{self.name}.stored: {self.stored!r} is no kind of number; use one of {', '.join(DTYPE_BYTES)}"
            )
        if self.stored == "f8" and self.dtype == "f4":
            raise StoreError(
                f"{self.name}.stored: f8 with dtype f4 holds nothing that f4 does not; use stored='f4' or dtype='f8'"
            )
        if self.rule.every and self.stored != self.dtype:
            raise StoreError(
                f"{self.name}.stored: {self.stored} with a rule that moves every row (rule.every), whose small steps it would round away; use "
                f"stored={self.dtype!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A dense parameter of `size` elements, flat, held in blocks of BLOCK elements."""

    name: str
    size: int
    rule: Rule = field(default_factory=Rule)
    init: Init = field(default_factory=lambda: Init(kind="zeros"))
    dtype: Literal["f4", "f8"] = "f4"

    def __post_init__(self) -> None:
        _check_name("dense", self.name)
        if self.rule.every:
            raise StoreError(
                f"{self.name}: rule.every is for tables; a dense parameter is always updated whole, leave it out"
            )
        _check_integer(f"{self.name}.size", self.size, 1, 2**38)
        _check_dtype(self.name, self.dtype)

    @property
    def blocks(self) -> int:
        """How many blocks it has."""
        return -(-self.size // BLOCK_SIZE)

    def block_length(self, block: int) -> int:
        """Elements of a block; the last one may be short."""
        if not 0 <= block < self.blocks:
            raise StoreError(f"{self.name}: block {block} of {self.blocks}; blocks hold {BLOCK_SIZE} elements each")
        return min(BLOCK_SIZE, self.size - block * BLOCK_SIZE)

    @property
    def in_one_shard(self) -> bool:
        """Whether its blocks must lie in one shard: LAMB's norm is over the parameter."""
        return self.rule.kind == "lamb"


def spec_to_plain(spec: Table | Dense) -> dict[str, Any]:
    """A table or dense parameter as JSON's plain values."""
    return {"what": "table" if isinstance(spec, Table) else "dense", **to_plain(spec)}


def spec_from_plain(plain: Mapping[str, Any], source: str = "spec") -> Table | Dense:
    """What `spec_to_plain` wrote; `source` names it in errors."""
    fields = dict(plain)
    what = fields.pop("what", None)
    if what == "table":
        return from_plain(Table, fields, source)
    if what == "dense":
        return from_plain(Dense, fields, source)
    raise DocumentError(f"{source}.what: {what!r}; expected 'table' or 'dense'")


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable():
        raise StoreError(f"{what}.name: {name!r}; use 1 to 200 printable characters")


def _check_dtype(name: str, dtype: object) -> None:
    if dtype not in ("f4", "f8"):
        raise StoreError(
            f"{name}.dtype: {dtype!r}; state and arithmetic are in 'f4' or 'f8' (rows may be narrower: stored=)"
        )


def _check_integer(path: str, value: object, minimum: int, maximum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise StoreError(f"{path}: {value!r}; use an integer from {minimum} to {maximum}")


def _check_number(path: str, value: object, *, minimum: float = -math.inf, upper_bound: float = math.inf) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not minimum <= value or not value < upper_bound:  # type: ignore[arg-type,operator]
        bounds = f" of at least {minimum:g}" * (minimum > -math.inf) + f" and below {upper_bound:g}" * (
            upper_bound < math.inf
        )
        raise StoreError(f"{path}: {value!r}; use a finite number{bounds}")
