"""Ways to distribute the columns of a pair over ranks; tp_trial.py finds out which one works.

A fused projection is cut part by part (queries, keys, values). Attributes with head counts and widths are divided too. If heads cannot be
distributed evenly, the columns of a head stay together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from echelon.partition.tp_layers import count_outputs, get_channel_attributes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible pair: the row reads only the columns, through the modules between, and nothing else reads those."""

    columns: tuple[str, ...]
    row: str
    between: tuple[str, ...] = ()
    is_hinted: bool = False  #: from the model's own tp plan

    @property
    def paths(self) -> tuple[str, ...]:
        """All of its modules."""
        return (*self.columns, *self.between, self.row)


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """How the columns of a pair are distributed."""

    fused_sizes: tuple[int, ...]  #: outputs of a single, fused column
    divided_attributes: tuple[tuple[str, str], ...]  #: (module path, attribute)
    shard_multiple: int  #: columns that stay together
    tp_size: int
    refitted_module: str | None = None  #: the module in which views ask for all columns


def iterate_layouts(
    model: nn.Module, candidate: Candidate, ancestor: str, row_width: int, tp_size: int
) -> Iterator[ColumnLayout]:
    """Every layout that may work, the simple ones first. `ancestor`: the module that holds the candidate; `row_width`: of the row's input."""
    for refitted_module in (None, ancestor):
        for fused_sizes in _iterate_fused_sizes(model, candidate.columns, row_width):
            for divided_attributes in _iterate_attribute_sets(model, candidate, ancestor, row_width):
                for shard_multiple in _list_shard_multiples(model, divided_attributes, row_width, tp_size):
                    yield ColumnLayout(fused_sizes, divided_attributes, shard_multiple, tp_size, refitted_module)


def _iterate_fused_sizes(model: nn.Module, columns: tuple[str, ...], row_width: int) -> Iterator[tuple[int, ...]]:
    yield ()
    if len(columns) > 1:
        return
    num_outputs = count_outputs(model.get_submodule(columns[0]))
    if num_outputs > row_width and (num_outputs - row_width) % 2 == 0:
        yield row_width, (num_outputs - row_width) // 2, (num_outputs - row_width) // 2
    if num_outputs == 2 * row_width:
        yield row_width, row_width


def _iterate_attribute_sets(
    model: nn.Module, candidate: Candidate, ancestor: str, row_width: int
) -> Iterator[tuple[tuple[str, str], ...]]:
    """Sets of attributes to divide: none but those of the modules between, counts of heads, those and widths, widths alone."""
    attributes = {path: get_channel_attributes(model.get_submodule(path)) or () for path in candidate.between}
    channel_counts = tuple((path, name) for path, names in attributes.items() for name in names)
    yield channel_counts
    module_paths = {ancestor}
    for path in candidate.paths:
        parent = path.rpartition(".")[0]
        while len(parent) >= len(ancestor) and parent not in module_paths:
            module_paths.add(parent)
            parent = parent.rpartition(".")[0]
    modules = [(path, model.get_submodule(path)) for path in sorted(module_paths)]
    integer_attributes = [(path, *item) for path, module in modules for item in _iterate_integer_attributes(module)]
    head_counts = [(module_path, name) for module_path, name, _ in integer_attributes if _counts_heads(name)]
    widths = {count_outputs(model.get_submodule(path)) for path in candidate.columns} | {row_width}
    width_attributes = [(path, name) for path, name, value in integer_attributes if {value, 3 * value} & widths]
    if head_counts:
        yield (*channel_counts, *head_counts)
    if width_attributes:
        yield (*channel_counts, *dict.fromkeys((*head_counts, *width_attributes)))
    widths_only = [attribute for attribute in width_attributes if attribute not in head_counts]
    if head_counts and widths_only:
        yield (*channel_counts, *widths_only)


def _iterate_integer_attributes(module: nn.Module) -> Iterator[tuple[str, int]]:
    for name, value in vars(module).items():
        if type(value) is int and value > 1 and not name.startswith("_"):
            yield name, value


def _counts_heads(name: str) -> bool:
    return "head" in name and not any(word in name for word in ("dim", "size", "width", "group"))


def _list_shard_multiples(
    model: nn.Module, divided_attributes: Sequence[tuple[str, str]], row_width: int, tp_size: int
) -> list[int]:
    """How many columns may have to stay together: one, or a head's if the heads cannot be distributed evenly."""
    modules = [model.get_submodule(path) for path, _ in divided_attributes]
    counts = {getattr(module, name) for module, (_, name) in zip(modules, divided_attributes, strict=True)}
    integers = [attribute for module in modules for attribute in _iterate_integer_attributes(module)]
    counts |= {value for name, value in integers if _counts_heads(name)}
    uneven = [count for count in counts if count % tp_size and count < row_width and row_width % count == 0]
    return [1, *sorted(row_width // count for count in uneven)]
