"""The module of a table that is on servers: it computes with the rows of its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from echelon.errors import PlanError, TrainingError
from echelon.plan.parameter_server import ServedTable


class FetchedRows:
    """Some rows of a table, in the order of their ids. Backward leaves their gradient in `values.grad`."""

    __slots__ = ("id_tensor", "ids", "values")

    def __init__(self, ids: np.ndarray, values: Tensor) -> None:
        self.ids, self.values = ids, values
        self.id_tensor = torch.from_numpy(ids).to(values.device)

    def find_positions(self, ids: Tensor) -> Tensor | None:
        """The positions of these ids among the rows; None where one is missing."""
        if not len(self.ids):
            return None
        positions = torch.searchsorted(self.id_tensor, ids).clamp_(max=len(self.ids) - 1)
        return positions if bool((self.id_tensor[positions] == ids).all()) else None

    def position_of(self, row_id: int | None) -> int | None:
        """The position of one id; None where it is missing."""
        position = -1 if row_id is None else int(np.searchsorted(self.ids, row_id))
        return position if 0 <= position < len(self.ids) and self.ids[position] == row_id else None


class EmptyTable(nn.Parameter):
    """Takes the place of a served table in its module: a name, a dtype and a width, without rows. While `is_in_forward()`, computing with it raises,
    as that would give other numbers than the table."""

    parameter_name: str
    is_in_forward: Callable[[], bool] = staticmethod(lambda: False)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = None
            if getattr(func, "__name__", "") in _METADATA_METHODS:
                result = func(*args, **(kwargs or {}))
                if not isinstance(result, Tensor):  # `.T` and `.data` are read in order to compute with them
                    return result
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, EmptyTable) and leaf.is_in_forward():
                    raise PlanError(
                        f"exchange=server: forward computes with {leaf.parameter_name} itself, of which a rank has only the rows of its batch; read it by "
                        "calling its module, or keep it with the ranks (a larger rows=)"
                    )
            return func(*args, **(kwargs or {})) if result is None else result


#: Methods of a tensor that compute nothing with it.
_METADATA_METHODS = (
    "__get__", "dim", "size", "numel", "element_size", "is_floating_point", "is_complex", "__hash__", "__repr__",
)  # fmt: skip


def remove_tables(model: nn.Module, tables: Sequence[ServedTable], *, keep_values: bool) -> dict[str, Tensor]:
    """Replace the tables of the model by empty ones; returns the initial values of their rows, where `keep_values`."""
    initial_tables: dict[str, Tensor] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for table in tables:
        module: Any = modules.get(table.path)
        weight, shape = getattr(module, "weight", None), (table.rows, table.dim)
        if not isinstance(weight, nn.Parameter) or tuple(weight.shape) != shape:
            raise PlanError(
                f"tables: {table.path} is not a table of {table.rows} x {table.dim} in this model; leave tables out: they are found"
            )
        if keep_values and table.initialized_by == "model":
            initial_tables[table.path] = weight.detach()
        empty_table = EmptyTable(torch.empty((0, table.dim), dtype=weight.dtype), True)
        empty_table.parameter_name = table.parameter_name
        module.weight = empty_table
    return initial_tables


#: Returns rows that include all of these ids, and the position of each.
RowFetcher = Callable[[str, Tensor], tuple[FetchedRows, Tensor]]


def install_remote_lookup(module: Any, table: ServedTable, fetch: RowFetcher) -> Callable[[], None]:
    """Make `module` compute with rows from `fetch`; returns what restores it."""

    def look_up(ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Positions among the fetched rows, these, and the position of the padding row (no gradient, not in bags)."""
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < table.rows):
            raise TrainingError(
                f"{table.path or 'the model'}: the ids {int(ids.min())} to {int(ids.max())} are looked up in a table of {table.rows} rows; "
                "ids are at least 0 and less than that"
            )
        rows, positions = fetch(table.path, ids)
        return positions.view(ids.shape), rows.values, rows.position_of(module.padding_idx)

    def embed(input: Tensor) -> Tensor:
        return F.embedding(*look_up(input))

    def embed_bag(input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        positions, values, padding_position = look_up(input)
        return F.embedding_bag(
            positions, values, offsets, mode=module.mode, per_sample_weights=per_sample_weights,
            include_last_offset=module.include_last_offset, padding_idx=padding_position,
        )  # fmt: skip

    module.forward = embed_bag if isinstance(module, nn.EmbeddingBag) else embed
    return lambda: module.__dict__.pop("forward", None)
