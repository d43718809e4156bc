"""Splits samples into columns, and builds samples and batches from columns.

A structure is the name of a column, or `{"tuple": [...]}`, `{"list": [...]}`, `{"dict": {key: ...}}` of structures: plain JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from echelon.errors import DataError


def infer_structure(sample: Any, path: str = "") -> Any:
    """Infer the structure of a sample; its leaves are named by their path (`0`, `image`, `boxes.1`)."""
    if isinstance(sample, Mapping):
        invalid_keys = [key for key in sample if not isinstance(key, str)]
        if invalid_keys:
            raise DataError(f"a sample has the key {invalid_keys[0]!r}: the keys of a packed sample must be text")
        return {"dict": {key: infer_structure(value, _join_path(path, key)) for key, value in sample.items()}}
    # A list of plain numbers is one ragged array, as JSON and tokenizers return it; a tuple of numbers is columns.
    is_number_list = isinstance(sample, list) and all(type(value) in (int, float, bool) for value in sample)
    if isinstance(sample, tuple | list) and sample and not is_number_list:
        kind = "tuple" if isinstance(sample, tuple) else "list"
        return {kind: [infer_structure(value, _join_path(path, str(index))) for index, value in enumerate(sample)]}
    return path or "value"


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def flatten_sample(sample: Any, structure: Any) -> list[Any]:
    if isinstance(structure, str):
        return [sample]
    ((kind, parts),) = structure.items()
    if kind == "dict":
        if not isinstance(sample, Mapping) or list(sample) != list(parts):
            return _flatten_reordered(sample, structure)
        return [leaf for key, part in parts.items() for leaf in flatten_sample(sample[key], part)]
    if not isinstance(sample, tuple | list) or len(sample) != len(parts):
        return _flatten_reordered(sample, structure)
    return [leaf for value, part in zip(sample, parts, strict=True) for leaf in flatten_sample(value, part)]


def _flatten_reordered(sample: Any, structure: Any) -> list[Any]:
    """Accept a dict with its keys in another order, and nothing else."""
    if isinstance(sample, Mapping) and "dict" in structure and set(sample) == set(structure["dict"]):
        return flatten_sample({key: sample[key] for key in structure["dict"]}, structure)
    raise ValueError(f"it is a {type(sample).__name__} of another structure")


def build_sample(structure: Any, values: Mapping[str, Any], *, batch: bool) -> Any:
    """Build a sample from column values, or, with `batch`, what torch's default_collate makes of samples: tuples become lists."""
    if isinstance(structure, str):
        return values[structure]
    ((kind, parts),) = structure.items()
    if kind == "dict":
        return {key: build_sample(part, values, batch=batch) for key, part in parts.items()}
    items = [build_sample(part, values, batch=batch) for part in parts]
    return tuple(items) if kind == "tuple" and not batch else items


def make_batch_builder(structure: Any, names: Sequence[str]) -> Callable[[list[Any]], Any]:
    """Specialize `build_sample` to batches from a list of columns."""
    if isinstance(structure, str):
        return lambda columns: columns[0]
    ((kind, parts),) = structure.items()
    if kind in ("tuple", "list") and all(isinstance(part, str) for part in parts):
        return list
    return lambda columns: build_sample(structure, dict(zip(names, columns, strict=True)), batch=True)
