"""What servers store: sparse tables, dense parameters, their update rules and initial values.

Dtypes, on the wire and in memory: f8, f4, f2 (floats of that many bytes), i2, i1 (integers with a scale per row).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from echelon.errors import DocumentError, ServerError
from echelon.plan.codec import from_plain, to_plain

#: Elements per block of a dense parameter: 256 KiB of fp32, which makes large frames and short copies.
BLOCK_SIZE = 65536
DTYPE_BYTES = {"f8": 8, "f4": 4, "f2": 2, "i2": 2, "i1": 1}
RULE_KINDS = ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "lamb")
#: Rules whose updates without a gradient can be applied later.
LAZY_RULE_KINDS = ("sgd", "momentum", "adagrad", "adam")
INIT_KINDS = ("zeros", "constant", "uniform", "normal")
_DEFAULT_EPS = {"adagrad": 1e-10, "rowwise_adagrad": 1e-10, "adam": 1e-8, "lamb": 1e-6}


class StoreError(ServerError):
    """A table, block or value that a store cannot hold."""


class StoreFull(StoreError):  # noqa: N818 (a state; its base says error)
    """No room for the rows of a push, of which nothing was applied."""


def check_learning_rate(name: str, lr: Any) -> None:
    """Refuse a push's learning rate that is not None (the rule's own) or finite."""
    is_valid = lr is None or (isinstance(lr, int | float) and not isinstance(lr, bool) and -1e300 < lr < 1e300)
    _require(is_valid, f"{name}: a rate of {lr!r}; use a finite number below 1e300")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a gradient updates weights: torch.optim's formulas of the same names.

    A push updates only the rows that it names, with their decay and momentum (as torch.optim.SparseAdam). With `every` each push to a table
    updates all its rows, and those that it does not name have a zero gradient (as torch.optim.Adam). `steps`: whether adam and lamb correct
    their bias by the row's (or block's) own number of updates, or by the step that the push gives.
    """

    kind: Literal["sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "lamb"] = "adagrad"
    lr: float = 0.01
    weight_decay: float = 0.0
    #: adam: decay the weights as AdamW does, not through the gradient.
    decoupled: bool = False
    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    #: None: the default of torch.optim.
    eps: float | None = None
    #: adagrad and rowwise_adagrad: the initial value of the accumulators.
    initial: float = 0.0
    steps: Literal["row", "given"] = "row"
    #: Tables: also update rows without a gradient (store.lazy_updates).
    every: bool = False

    def __post_init__(self) -> None:
        _check_choice("rule.kind", self.kind, RULE_KINDS)
        for name in ("lr", "weight_decay", "dampening", "initial"):
            _check_number(f"rule.{name}", getattr(self, name), minimum=0.0)
        for name in ("momentum", "beta1", "beta2"):
            _check_number(f"rule.{name}", getattr(self, name), minimum=0.0, upper_bound=1.0)
        if self.eps is not None:
            _check_number("rule.eps", self.eps, minimum=0.0)
        _check_choice("rule.steps", self.steps, ("row", "given"))
        allows_nesterov = self.kind == "momentum" and self.momentum != 0 and self.dampening == 0
        _require(allows_nesterov or not self.nesterov, "rule.nesterov: needs a 'momentum' above 0 without dampening")
        _require(self.kind == "adam" or not self.decoupled, f"rule.decoupled: is for adam, not for {self.kind}")
        _require(
            not self.every or (self.kind in LAZY_RULE_KINDS and self.steps == "row"),
            f"rule.every: is for {', '.join(LAZY_RULE_KINDS)} with steps='row', not for {self.kind} with steps={self.steps!r}",
        )

    @property
    def replays_each_update(self) -> bool:
        """Whether the updates that a row missed must be computed one by one."""
        coupled = self.kind == "adagrad" or (self.kind == "adam" and not self.decoupled)
        return self.every and coupled and self.weight_decay != 0

    @property
    def epsilon(self) -> float:
        """The term that keeps divisions finite."""
        return _DEFAULT_EPS.get(self.kind, 0.0) if self.eps is None else self.eps


@dataclass(frozen=True, slots=True, kw_only=True)
class Init:
    """Initial values by (name, seed, id, column): every server creates the same row, in f8 and, rounded, in f4.

    uniform: value ± scale; normal: mean `value`, standard deviation `scale`; constant: `value`.
    """

    kind: Literal["zeros", "constant", "uniform", "normal"] = "uniform"
    scale: float = 0.01
    value: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_choice("init.kind", self.kind, INIT_KINDS)
        _check_number("init.scale", self.scale, minimum=0.0)
        _check_number("init.value", self.value)
        _check_integer("init.seed", self.seed, 0, 2**63 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A sparse table: rows of `dim` numbers by 64-bit id, created when first pushed to.

    `dtype`: of state and arithmetic; `stored`: of the weights in memory. `admit`: the number of pushes to an id until its row is created;
    the gradients of earlier ones are dropped.
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
        _check_choice(f"{self.name}.dtype", self.dtype, ("f4", "f8"))
        _check_choice(f"{self.name}.stored", self.stored, DTYPE_BYTES)
        _require(
            self.stored != "f8" or self.dtype == "f8",
            f"{self.name}.stored: f8 with dtype f4 holds nothing that f4 does not; use stored='f4' or dtype='f8'",
        )
        _require(
            not self.rule.every or self.stored == self.dtype,
            f"{self.name}.stored: {self.stored} would round away the small steps of rule.every; use stored={self.dtype!r}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A dense parameter of `size` elements, flat, stored in blocks of BLOCK_SIZE elements."""

    name: str
    size: int
    rule: Rule = field(default_factory=Rule)
    init: Init = field(default_factory=lambda: Init(kind="zeros"))
    dtype: Literal["f4", "f8"] = "f4"

    def __post_init__(self) -> None:
        _check_name("dense", self.name)
        _require(not self.rule.every, f"{self.name}: rule.every is for tables; dense parameters are updated whole")
        _check_integer(f"{self.name}.size", self.size, 1, 2**38)
        _check_choice(f"{self.name}.dtype", self.dtype, ("f4", "f8"))

    @property
    def blocks(self) -> int:
        return -(-self.size // BLOCK_SIZE)

    def block_length(self, block: int) -> int:
        """Elements of a block; the last block may be shorter."""
        _require(0 <= block < self.blocks, f"{self.name}: block {block} of {self.blocks}")
        return min(BLOCK_SIZE, self.size - block * BLOCK_SIZE)

    @property
    def in_one_shard(self) -> bool:
        """Whether one shard must hold all blocks: LAMB's norm is over the parameter."""
        return self.rule.kind == "lamb"


def spec_to_plain(spec: Table | Dense) -> dict[str, Any]:
    """A table or dense parameter as JSON values."""
    return {"what": "table" if isinstance(spec, Table) else "dense", **to_plain(spec)}


def spec_from_plain(plain: Mapping[str, Any], source: str = "spec") -> Table | Dense:
    """The inverse of `spec_to_plain`; `source` names it in errors."""
    fields = dict(plain)
    what = fields.pop("what", None)
    if what == "table":
        return from_plain(Table, fields, source)
    if what == "dense":
        return from_plain(Dense, fields, source)
    raise DocumentError(f"{source}.what: {what!r}; expected 'table' or 'dense'")


def _require(is_valid: bool, message: str) -> None:
    if not is_valid:
        raise StoreError(message)


def _check_choice(path: str, value: object, choices: Collection[str]) -> None:
    _require(value in choices, f"{path}: {value!r}; use one of {', '.join(choices)}")


def _check_name(what: str, name: object) -> None:
    is_valid = isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable()
    _require(is_valid, f"{what}.name: {name!r}; use 1 to 200 printable characters")


def _check_integer(path: str, value: object, minimum: int, maximum: int) -> None:
    is_valid = isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum
    _require(is_valid, f"{path}: {value!r}; use an integer from {minimum} to {maximum}")


def _check_number(path: str, value: object, *, minimum: float = -math.inf, upper_bound: float = math.inf) -> None:
    is_finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_finite or not minimum <= value < upper_bound:  # type: ignore[operator]
        bounds = f" of at least {minimum:g}" * (minimum > -math.inf)
        bounds += f" and below {upper_bound:g}" * (upper_bound < math.inf)
        raise StoreError(f"{path}: {value!r}; use a finite number{bounds}")
