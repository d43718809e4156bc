"""Rows of published runs: read, and refused where a value is not in the vocabulary that docs/published.md defines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError

ROWS = Path(__file__).with_name("rows.jsonl")

_ARCHS = ("gpt", "llama", "nemotron", "bert", "resnet50", "resnet101", "vgg16", "inception_v3")
TRANSFORMERS = ("gpt", "llama", "nemotron", "bert")
_YES = (True, False, None)
#: Part of a row -> field -> values that it may have.
_VOCABULARY: dict[str, dict[str, tuple[Any, ...]]] = {
    "": {"trust": ("A", "B", "C")},
    "model": {"arch": _ARCHS, "gated_mlp": _YES, "tied_embeddings": _YES},
    "hardware": {
        "gpu": (
            "V100-16GB", "V100-32GB", "P100-16GB", "A100-40GB", "A100-80GB", "A800-80GB", "H100-80GB", "H100-96GB", "H200-141GB",
            "B200-192GB", "GB200-192GB", "GB300-288GB", "MI300X-192GB",
        ),
        "state": ("before-fix", "after-fix", None),
    },
    "hardware.intra": {
        "kind": ("nvswitch", "nvlink-mesh", "xgmi-mesh", None),
        "known": ("stated", "spec", "assumed", "unknown", "none"),
    },
    "hardware.inter": {
        "kind": ("infiniband", "roce", "omnipath", "efa", "unspecified", None),
        "known": ("stated", "spec", "assumed", "unknown", "none"),
    },
    "plan": {
        "schedule": ("none", "1f1b", "interleaved", None),
        "zero_stage": (0, 1, 2, 3, None),
        "recompute": ("none", "full", "attention", "ops", "alternate", "some", "unknown", None),
        "precision": ("fp32", "tf32", "fp16", "bf16", "fp8", "nvfp4"),
        "fp8_recipe": ("delayed", "current", "tensorwise", "rowwise", "mx", "unknown", None),
        "grad_reduce": ("fp32", "bf16", None),
        "attention": ("flash1", "flash2", "flash", "cudnn", "fused-softmax", "eager", "no-flash", "none", "unknown", None),
        "optimizer": ("adam", "adamw", "lamb", None),
        "fp8_params": _YES, "fp8_all_gather": _YES, "fused_norm": _YES, "compile": _YES, "async_tp": _YES, "overlap": _YES,
        "sequence_parallel": _YES,
    },
    "measured": {"mem_kind": ("nvidia-smi", "reserved", "unspecified", None), "oom": _YES},
}  # fmt: skip
_COUNTS = ("time", "rank", "fit", "memory")
_UNKNOWN = (
    "axes", "zero_stage", "micro_batch", "global_batch", "recompute", "vp", "sequence_parallel", "fp8_recipe", "attention", "intra", "inter",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One printed result. `model`, `hardware`, `plan` and `measured` are as the file has them."""

    id: str
    source: str
    counts: tuple[str, ...]
    unknown: tuple[str, ...]
    group: str | None
    repeat_of: str | None
    gpus: int
    model: dict[str, Any]
    hardware: dict[str, Any]
    plan: dict[str, Any]
    measured: dict[str, Any]


def read(path: str | Path) -> list[Row]:
    """The rows of a file, every one checked."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EchelonError(f"{path}: cannot be read ({error}); give a file of rows, one JSON object a line") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            plain = json.loads(line)
        except ValueError as error:
            raise EchelonError(f"{path} line {number}: not JSON ({error})") from error
        rows.append(_row(plain, f"{path} line {number}"))
    seen = {row.id for row in rows}
    if len(seen) < len(rows):
        raise EchelonError(f"{path}: {len(rows)} rows but {len(seen)} ids; each row has an id of its own")
    return rows


def _row(plain: dict[str, Any], where: str) -> Row:
    try:
        for part, fields in _VOCABULARY.items():
            found = plain
            for name in part.split(".") if part else ():
                found = found[name]
            for field, values in fields.items():
                _check(where, f"{part}.{field}".strip("."), found.get(field), values)
        for field, values in (("counts", _COUNTS), ("unknown", _UNKNOWN)):
            for value in plain[field]:
                _check(where, field, value, values)
        _numbers(plain, where)
        return Row(
            id=plain["id"],
            source=plain["source"],
            counts=tuple(plain["counts"]),
            unknown=tuple(plain["unknown"]),
            group=plain.get("group"),
            repeat_of=plain.get("repeat_of"),
            gpus=plain["num_gpus"],
            model=plain["model"],
            hardware=plain["hardware"],
            plan=plain["plan"],
            measured=plain["measured"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise EchelonError(
            f"{where}: {error} is missing or not of the form that docs/published.md describes"
        ) from error


#: Fields that a row must have, a number above 0 or null; and those that may not be null.
_NUMBERS = {
    "plan": ("dp", "tp", "pp", "cp", "ep", "vp", "zero_scope", "micro_batch", "global_batch", "grad_accum", "local_batch"),
    "hardware": ("mem_gb", "hbm_gb_s", "power_cap_w", "gpus_per_node"),
    "measured": ("iteration_s", "peak_mem_gib"),
    "model": (),
}  # fmt: skip
_SHAPES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq_len")


def _numbers(plain: dict[str, Any], where: str) -> None:
    """Numbers are numbers, there is what the row is scored on, and what must agree does."""
    shapes = _SHAPES if plain["model"]["arch"] in TRANSFORMERS else ()
    needed = {"num_gpus": plain["num_gpus"], "hardware.gpus_per_node": plain["hardware"]["gpus_per_node"]}
    needed |= {f"model.{name}": plain["model"][name] for name in shapes}
    for part, fields in _NUMBERS.items():
        for field in fields:
            value = plain[part][field]
            if value is not None and not _positive(value):
                raise EchelonError(f"{where}: {part}.{field}={value!r} is no number above 0")
    for link in ("intra", "inter"):
        value = plain["hardware"][link]["gb_s"]
        if value is not None and not _positive(value):
            raise EchelonError(f"{where}: hardware.{link}.gb_s={value!r} is no number above 0")
    measured, plan, counts = plain["measured"], plain["plan"], plain["counts"]
    for count, field in (("time", "iteration_s"), ("rank", "iteration_s"), ("memory", "peak_mem_gib"), ("fit", "oom")):
        if count in counts:
            needed[f"measured.{field}"] = measured[field] if field != "oom" or measured[field] is None else 1
    for name, value in needed.items():
        if not _positive(value):
            raise EchelonError(f"{where}: {name}={value!r}, and a row of this kind needs it")
    axes = [plan[axis] for axis in ("dp", "tp", "pp", "cp")]
    if None not in axes and "axes" not in plain["unknown"] and math.prod(axes) != plain["num_gpus"]:
        raise EchelonError(f"{where}: dp x tp x pp x cp is {math.prod(axes)} and num_gpus={plain['num_gpus']}")
    parts = [plan[name] for name in ("dp", "micro_batch", "grad_accum")]
    if None not in (*parts, plan["global_batch"]) and math.prod(parts) != plan["global_batch"]:
        raise EchelonError(
            f"{where}: dp x micro_batch x grad_accum is {math.prod(parts)} and global_batch={plan['global_batch']}"
        )


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _check(where: str, field: str, value: Any, values: tuple[Any, ...]) -> None:
    if not any(value is each or (value == each and type(value) is type(each)) for each in values):
        known = ", ".join(map(repr, values))
        raise EchelonError(
            f"{where}: {field}={value!r} is not one of {known}; a new value needs a new reader, none is guessed"
        )


def sets(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows with their repeats: a set of repeats counts once."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.repeat_of or row.id, []).append(row)
    yield from found.values()
