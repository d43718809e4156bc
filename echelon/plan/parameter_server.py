"""What a parameter server holds of a model, as a plan names it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from echelon.plan.plan import Plan
    from echelon.plan.profile import Profile, TableProfile

#: Tables of fewer rows stay with the ranks unless a plan says otherwise: the way to a server costs more than such a table does.
DEFAULT_MIN_ROWS = 10_000
#: A table of more bytes than this is never made on a rank: its rows begin on the servers, each as its id says.
MAX_RANK_TABLE_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTable:
    """A table (nn.Embedding, nn.EmbeddingBag) whose rows are the servers' and not the ranks'."""

    path: str  #: of the module
    rows: int
    dim: int
    #: What rows begin with: what the model gives them, or normal numbers that follow from seed and id alone (a table that no rank could make).
    initialized_by: Literal["model", "server"] = "model"

    @property
    def parameter_name(self) -> str:
        """Of the parameter."""
        return f"{self.path}.weight" if self.path else "weight"

    @property
    def elements(self) -> int:
        """Numbers in it."""
        return self.rows * self.dim


def choose_served_tables(plan: Plan, profile: Profile) -> tuple[ServedTable, ...]:
    """The tables that the servers of `plan` are to hold: all that can be served and are large enough."""
    return tuple(_to_served_table(table) for table in large_tables(plan, profile) if not table.unsupported_reason)


def large_tables(plan: Plan, profile: Profile) -> Iterator[TableProfile]:
    """The tables that are large enough, whether they can be served or not."""
    return (table for table in profile.tables if table.rows >= plan.server.min_table_rows)


def _to_served_table(table: TableProfile) -> ServedTable:
    start: Literal["model", "server"] = "server" if table.bytes > MAX_RANK_TABLE_BYTES else "model"
    return ServedTable(path=table.path, rows=table.rows, dim=table.dim, initialized_by=start)
