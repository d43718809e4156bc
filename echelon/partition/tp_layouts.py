"""Ways to deal out the columns of a pair to ranks; tp_trial.py tries which of them works.

A fused projection is dealt out part by part (queries, keys, values). Head counts and widths that the code keeps in attributes are divided
too. Where heads cannot be dealt out evenly, their columns stay together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from echelon.partition.tp_layers import count_outputs, get_channel_attributes


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may be a pair: the row reads the columns alone, through the modules between, and nothing else reads those."""

    columns: tuple[str, ...]
    row: str
    between: tuple[str, ...] = ()
    is_hinted: bool = False  #: the model's authors say so

    @property
    def paths(self) -> tuple[str, ...]:
        """All of its modules."""
        return (*self.columns, *self.between, self.row)


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """How the columns of a pair are dealt out."""

    fused_sizes: tuple[int, ...]  #: of the columns' outputs, where there is one column and it is fused
    divided_attributes: tuple[tuple[str, str], ...]  #: (module path, attribute)
    shard_multiple: int  #: columns that stay together
    tp_size: int
    refitted_module: str | None = None  #: the module in which views ask for all columns


def iterate_layouts(
    model: nn.Module, candidate: Candidate, ancestor: str, row_width: int, tp_size: int
) -> Iterator[ColumnLayout]:
    """Every layout that may work, the plain ones first. `ancestor`: the module that holds the candidate; `row_width`: of what its row is given."""
    for refitted_module in (None, ancestor):
        for fused_sizes in _iterate_fused_sizes(model, candidate.columns, row_width):
            for divided_attributes in _iterate_attribute_sets(model, candidate, ancestor, row_width):
                for shard_multiple in _list_shard_multiples(model, divided_attributes, row_width, tp_size):
                    yield ColumnLayout(fused_sizes, divided_attributes, shard_multiple, tp_size, refitted_module)


def _iterate_fused_sizes(model: nn.Module, columns: tuple[str, ...], row_width: int) -> Iterator[tuple[int, ...]]:
    """Ways in which a fused projection may be laid out."""
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
    integer_attributes = [
        (module_path, *attribute)
        for module_path in sorted(module_paths)
        for attribute in _iterate_integer_attributes(model.get_submodule(module_path))
    ]
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
    """Attributes that may count something."""
    for name, value in vars(module).items():
        if type(value) is int and value > 1 and not name.startswith("_"):
            yield name, value


def _counts_heads(name: str) -> bool:
    return "head" in name and not any(word in name for word in ("dim", "size", "width", "group"))


def _list_shard_multiples(
    model: nn.Module, divided_attributes: Sequence[tuple[str, str]], row_width: int, tp_size: int
) -> list[int]:
    """How many columns may have to stay together: one, or a head's where the heads cannot be dealt out evenly."""
    counts = {getattr(model.get_submodule(path), name) for path, name in divided_attributes}
    counts |= {
        value
        for path, _ in divided_attributes
        for name, value in _iterate_integer_attributes(model.get_submodule(path))
        if _counts_heads(name)
    }
    uneven = [count for count in counts if count % tp_size and count < row_width and row_width % count == 0]
    return [1, *sorted(row_width // count for count in uneven)]
