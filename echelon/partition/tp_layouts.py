"""Ways in which the columns of a pair may be dealt out to ranks. Which of them works is found out in columns.py.

A fused projection is dealt out part by part (queries, keys, values). Counts of heads and widths that the code holds in attributes are
divided along. Where heads cannot be dealt out evenly their columns stay together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from echelon.partition.tp_layers import channelwise, outputs


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may be a pair: the row reads the columns alone, through the modules between, and nothing else reads those."""

    columns: tuple[str, ...]
    row: str
    between: tuple[str, ...] = ()
    hinted: bool = False  #: the model's authors say so

    @property
    def paths(self) -> tuple[str, ...]:
        """All of its modules."""
        return (*self.columns, *self.between, self.row)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the columns of a pair are dealt out."""

    parts: tuple[int, ...]  #: of the columns' outputs, where there is one column and it is fused
    divide: tuple[tuple[str, str], ...]  #: (module path, attribute)
    unit: int  #: columns that stay together
    ways: int
    fits: str | None = None  #: the module in which views ask for all columns


def layouts(model: nn.Module, candidate: Candidate, holder: str, width: int, ways: int) -> Iterator[Layout]:
    """Every layout that may work, the plain ones first. `holder`: the module that holds the candidate; `width`: of what its row is given."""
    for fits in (None, holder):
        for parts in _parts(model, candidate.columns, width):
            for divide in _attributes(model, candidate, holder, width):
                for unit in _units(model, divide, width, ways):
                    yield Layout(parts, divide, unit, ways, fits)


def _parts(model: nn.Module, columns: tuple[str, ...], width: int) -> Iterator[tuple[int, ...]]:
    """Ways in which a fused projection may be laid out."""
    yield ()
    if len(columns) > 1:
        return
    total = outputs(model.get_submodule(columns[0]))
    if total > width and (total - width) % 2 == 0:
        yield width, (total - width) // 2, (total - width) // 2
    if total == 2 * width:
        yield width, width


def _attributes(
    model: nn.Module, candidate: Candidate, holder: str, width: int
) -> Iterator[tuple[tuple[str, str], ...]]:
    """Sets of attributes to divide: none but those of the modules between, counts of heads, those and widths, widths alone."""
    own = tuple((path, name) for path in candidate.between for name in channelwise(model.get_submodule(path)) or ())
    yield own
    places = {holder}
    for path in candidate.paths:
        parent = path.rpartition(".")[0]
        while len(parent) >= len(holder) and parent not in places:
            places.add(parent)
            parent = parent.rpartition(".")[0]
    numbers = [(place, *each) for place in sorted(places) for each in _numbers(model.get_submodule(place))]
    heads = [(place, name) for place, name, _ in numbers if _counts_heads(name)]
    widths = {outputs(model.get_submodule(path)) for path in candidate.columns} | {width}
    wide = [(place, name) for place, name, value in numbers if value in widths or 3 * value in widths]
    if heads:
        yield (*own, *heads)
    if wide:
        yield (*own, *dict.fromkeys((*heads, *wide)))
    alone = [each for each in wide if each not in heads]
    if heads and alone:
        yield (*own, *alone)


def _numbers(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Attributes that may count something."""
    for name, value in vars(module).items():
        if type(value) is int and value > 1 and not name.startswith("_"):
            yield name, value


def _counts_heads(name: str) -> bool:
    return "head" in name and not any(word in name for word in ("dim", "size", "width", "group"))


def _units(model: nn.Module, divide: Sequence[tuple[str, str]], width: int, ways: int) -> list[int]:
    """How many columns may have to stay together: one, or a head's where the heads cannot be dealt out evenly."""
    counts = {getattr(model.get_submodule(path), name) for path, name in divide}
    counts |= {
        value for path, _ in divide for name, value in _numbers(model.get_submodule(path)) if _counts_heads(name)
    }
    return [1, *sorted(width // count for count in counts if count % ways and count < width and width % count == 0)]
