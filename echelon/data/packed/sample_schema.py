"""Samples taken apart into columns, and columns put together into samples and batches.

A structure is the name of a column, or `{"tuple": [...]}`, `{"list": [...]}`, `{"dict": {key: ...}}` of structures: plain JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from echelon.errors import DataError


def structure_of(sample: Any, path: str = "") -> Any:
    """The structure of a sample; its leaves are named by their place (`0`, `image`, `boxes.1`)."""
    if isinstance(sample, Mapping):
        strange = [key for key in sample if not isinstance(key, str)]
        if strange:
            raise DataError(f"a sample has the key {strange[0]!r}: the keys of a packed sample are text")
        return {"dict": {key: structure_of(value, _under(path, key)) for key, value in sample.items()}}
    if isinstance(sample, tuple | list) and sample and not _numbers(sample):
        kind = "tuple" if isinstance(sample, tuple) else "list"
        return {kind: [structure_of(value, _under(path, str(place))) for place, value in enumerate(sample)]}
    return path or "value"


def _numbers(sample: tuple[Any, ...] | list[Any]) -> bool:
    """A list of plain numbers is one ragged array, as JSON and tokenizers give it; a tuple of them is columns."""
    return isinstance(sample, list) and all(type(value) in (int, float, bool) for value in sample)


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def leaves(sample: Any, structure: Any) -> list[Any]:
    """The sample's values in the order of the columns."""
    if isinstance(structure, str):
        return [sample]
    ((kind, parts),) = structure.items()
    if kind == "dict":
        if not isinstance(sample, Mapping) or list(sample) != list(parts):
            return _other(sample, structure)
        return [leaf for key, part in parts.items() for leaf in leaves(sample[key], part)]
    if not isinstance(sample, tuple | list) or len(sample) != len(parts):
        return _other(sample, structure)
    return [leaf for value, part in zip(sample, parts, strict=True) for leaf in leaves(value, part)]


def _other(sample: Any, structure: Any) -> list[Any]:
    """A dict may have its keys in another order; anything else is another kind of sample."""
    if isinstance(sample, Mapping) and "dict" in structure and set(sample) == set(structure["dict"]):
        return leaves({key: sample[key] for key in structure["dict"]}, structure)
    raise ValueError(f"it is a {type(sample).__name__} of another structure")


def built(structure: Any, values: Mapping[str, Any], *, batch: bool) -> Any:
    """A sample of these column values, or, with `batch`, what torch's default_collate makes of such samples: tuples become lists."""
    if isinstance(structure, str):
        return values[structure]
    ((kind, parts),) = structure.items()
    if kind == "dict":
        return {key: built(part, values, batch=batch) for key, part in parts.items()}
    made = [built(part, values, batch=batch) for part in parts]
    return tuple(made) if kind == "tuple" and not batch else made


def builder(structure: Any, names: Sequence[str]) -> Callable[[list[Any]], Any]:
    """`built` for batches, from a list of columns; the usual structures without a detour."""
    if isinstance(structure, str):
        return lambda columns: columns[0]
    ((kind, parts),) = structure.items()
    if kind in ("tuple", "list") and all(isinstance(part, str) for part in parts):
        return list
    return lambda columns: built(structure, dict(zip(names, columns, strict=True)), batch=True)
