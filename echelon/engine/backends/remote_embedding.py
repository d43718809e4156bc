"""A table's module on a rank that does not hold the table: it computes with the rows of its batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from echelon.errors import PlanError, TrainingError
from echelon.plan.parameter_server import Served


class Rows:
    """Some rows of a table, in the order of their ids. Backward leaves its gradient in `values.grad`."""

    __slots__ = ("ids", "places", "values")

    def __init__(self, ids: np.ndarray, values: Tensor) -> None:
        self.ids, self.values = ids, values
        self.places = torch.from_numpy(ids).to(values.device)

    def find(self, ids: Tensor) -> Tensor | None:
        """Where these ids lie among the rows; None where one is not there."""
        if not len(self.ids):
            return None
        found = torch.searchsorted(self.places, ids).clamp_(max=len(self.ids) - 1)
        return found if bool((self.places[found] == ids).all()) else None


class Standin(nn.Parameter):
    """What a module holds in place of a table that is a server's: a name, a dtype and a width, without rows. While `inside()`, nothing can be
    computed with it, which would give other numbers than with the table."""

    title: str
    inside: Callable[[], bool]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = None
            if getattr(func, "__name__", "") in _HARMLESS:
                out = func(*args, **(kwargs or {}))
                if not isinstance(out, Tensor):  # `.T` and `.data` are asked for in order to compute with them
                    return out
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, Standin) and getattr(each, "inside", _never)():
                    raise PlanError(
                        f"exchange=server: forward computes with {each.title} itself, of which a rank has only the rows of its batch; read it by "
                        "calling its module, or keep it with the ranks (a larger rows=)"
                    )
            return func(*args, **(kwargs or {})) if out is None else out


#: What is asked of a tensor and computes nothing with it.
_HARMLESS = (
    "__get__",
    "dim",
    "size",
    "numel",
    "element_size",
    "is_floating_point",
    "is_complex",
    "__hash__",
    "__repr__",
)


def _never() -> bool:
    return False


#: Gives rows that hold all of these ids, and where each of them lies, flat.
Fetch = Callable[[str, Tensor], tuple[Rows, Tensor]]


def install(module: nn.Module, table: Served, fetch: Fetch) -> Callable[[], None]:
    """Have `module` compute with rows from `fetch`; returns what puts it back."""
    lookup = _Lookup(module, table, fetch)
    forward = lookup.bag if isinstance(module, nn.EmbeddingBag) else lookup.embedding
    module.forward = forward

    def put_back() -> None:
        module.__dict__.pop("forward", None)

    return put_back


class _Lookup:
    def __init__(self, module: Any, table: Served, fetch: Fetch) -> None:
        self._module, self._table, self._fetch = module, table, fetch

    def embedding(self, input: Tensor) -> Tensor:
        rows, places = self._rows(input)
        return F.embedding(places, rows.values, self._padding(rows))

    def bag(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        rows, places = self._rows(input)
        module = self._module
        return F.embedding_bag(
            places, rows.values, offsets, mode=module.mode, per_sample_weights=per_sample_weights,
            include_last_offset=module.include_last_offset, padding_idx=self._padding(rows),
        )  # fmt: skip

    def _rows(self, ids: Tensor) -> tuple[Rows, Tensor]:
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < self._table.rows):
            raise TrainingError(
                f"{self._table.path or 'the model'}: the ids {int(ids.min())} to {int(ids.max())} are looked up in a table of "
                f"{self._table.rows} rows; ids are at least 0 and less than that"
            )
        rows, places = self._fetch(self._table.path, ids)
        return rows, places.view(ids.shape)

    def _padding(self, rows: Rows) -> int | None:
        """The row that pads, by its place; its gradient is nothing, and a bag leaves it out."""
        padding = self._module.padding_idx
        if padding is None or not len(rows.ids):
            return None
        place = int(np.searchsorted(rows.ids, padding))
        return place if place < len(rows.ids) and rows.ids[place] == padding else None
