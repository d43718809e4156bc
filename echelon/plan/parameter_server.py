"""What a parameter server holds of a model, as a plan names it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from echelon.plan.plan import Plan
    from echelon.plan.profile import Profile, TableProfile

#: Tables of fewer rows stay on the ranks by default: the round trip to a server costs more than such a table.
DEFAULT_MIN_ROWS = 10_000
#: A larger table is never allocated on a rank: servers initialize its rows from their ids.
MAX_RANK_TABLE_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTable:
    """A table (nn.Embedding, nn.EmbeddingBag) whose rows are on the servers instead of the ranks."""

    path: str  #: of the module
    rows: int
    dim: int
    #: Initial rows: the model's, or normal random numbers from seed and id (a table that no rank could hold).
    initialized_by: Literal["model", "server"] = "model"

    @property
    def parameter_name(self) -> str:
        """Name of its weight."""
        return f"{self.path}.weight" if self.path else "weight"

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.rows * self.dim


def choose_served_tables(plan: Plan, profile: Profile) -> tuple[ServedTable, ...]:
    """The tables for the servers of `plan`: all that are supported and large enough."""
    return tuple(_to_served_table(table) for table in large_tables(plan, profile) if not table.unsupported_reason)


def large_tables(plan: Plan, profile: Profile) -> Iterator[TableProfile]:
    """The tables that are large enough, supported by servers or not."""
    return (table for table in profile.tables if table.rows >= plan.server.min_table_rows)


def _to_served_table(table: TableProfile) -> ServedTable:
    start: Literal["model", "server"] = "server" if table.bytes > MAX_RANK_TABLE_BYTES else "model"
    return ServedTable(path=table.path, rows=table.rows, dim=table.dim, initialized_by=start)
