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
    "": {"trust": ("A", "B", "C", None)},
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
        "known": ("stated", "spec", "assumed", "unknown", "none", None),
    },
    "hardware.inter": {
        "kind": ("infiniband", "roce", "omnipath", "efa", "unspecified", None),
        "known": ("stated", "spec", "assumed", "unknown", "none", None),
    },
    "plan": {
        "schedule": ("none", "1f1b", "interleaved", None),
        "zero_stage": (0, 1, 2, 3, None),
        "recompute": ("none", "full", "attention", "ops", "alternate", "some", "unknown", None),
        "precision": ("fp32", "tf32", "fp16", "bf16", "fp8", "nvfp4", None),
        "fp8_recipe": ("delayed", "current", "tensorwise", "rowwise", "mx", "unknown", None),
        "grad_reduce": ("fp32", "bf16", None),
        "attention": ("flash1", "flash2", "flash", "cudnn", "fused-softmax", "eager", "no-flash", "none", "unknown", None),
        "optimizer": ("adam", "adamw", "lamb", None),
        "fp8_params": _YES, "fp8_all_gather": _YES, "fused_norm": _YES, "compile": _YES, "async_tp": _YES, "overlap": _YES,
        "sequence_parallel": _YES,
    },
    "measured": {
        "iteration_from": ("printed", "tokens_per_s", "sequences_per_s", "tflops", None),
        "mem_kind": ("nvidia-smi", "reserved", "unspecified", None),
        "oom": _YES,
    },
}  # fmt: skip
_COUNTS = ("time", "rank", "fit", "memory")
_UNKNOWN = (
    "axes", "zero_stage", "micro_batch", "global_batch", "recompute", "vp", "sequence_parallel", "fp8_recipe", "attention", "intra", "inter",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One printed result. `model`, `hardware`, `plan` and `measured` are as the file has them."""

    line: int  #: of the file
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A line that is no row, or a row that cannot be forecast, and why."""

    line: int
    id: str | None
    reason: str


def read(path: str | Path) -> list[Row]:
    """The rows of a file, every one checked; the first that is wrong is an error."""
    rows, refused = scan(path)
    if refused:
        raise EchelonError(refused[0].reason)
    return rows


def scan(path: str | Path) -> tuple[list[Row], list[Refused]]:
    """(rows that can be forecast, lines that cannot): one that is wrong does not end the others."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EchelonError(f"{path}: cannot be read ({error}); give a file of rows, one JSON object a line") from error
    rows: dict[str, Row] = {}
    refused = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where, plain = f"{path} line {number}", None
        try:
            plain = _json(line, where)
            row = _row(plain, where, number)
            if row.id in rows:
                raise EchelonError(
                    f"{where}: id={row.id!r} is that of line {rows[row.id].line} too; each row has an id of its own"
                )
            rows[row.id] = row
        except EchelonError as error:
            name = plain.get("id") if isinstance(plain, dict) else None
            refused.append(Refused(line=number, id=name if isinstance(name, str) else None, reason=str(error)))
    return list(rows.values()), refused


def _json(line: str, where: str) -> dict[str, Any]:
    try:
        plain = json.loads(line)
    except ValueError as error:
        raise EchelonError(f"{where}: not JSON ({error}); a row is one JSON object on one line") from error
    if not isinstance(plain, dict):
        raise EchelonError(f"{where}: {plain!r} is no JSON object; a row is one, as docs/published.md describes it")
    return plain


#: Fields that are a number above 0 or null, and of these such as count something.
_NUMBERS: dict[str, tuple[str, ...]] = {
    "": (),
    "model": ("params_total_est", "params_reported"),
    "hardware": (
        "mem_gb", "hbm_gb_s", "power_cap_w", "peak_tflops_dense_16bit", "peak_tflops_dense_fp8", "peak_tflops_dense_fp4",
        "peak_tflops_dense_tf32", "peak_tflops_dense_fp32",
    ),
    "hardware.intra": ("gb_s",),
    "hardware.inter": ("gb_s",),
    "plan": (),
    "measured": ("iteration_s", "peak_mem_gib", "samples_per_s"),
}  # fmt: skip
_SHAPES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq_len")
_WHOLE: dict[str, tuple[str, ...]] = {
    "": ("num_gpus",),
    "model": _SHAPES,
    "hardware": ("gpus_per_node",),
    "hardware.intra": ("domain",),
    "hardware.inter": ("nics",),
    "plan": ("dp", "tp", "pp", "cp", "ep", "vp", "zero_scope", "micro_batch", "global_batch", "grad_accum", "local_batch"),
}  # fmt: skip
#: What follows from other figures where it is not said.
_DERIVED = ("kv_heads", "head_dim", "ffn")


def _row(plain: dict[str, Any], where: str, number: int) -> Row:
    """A row with every field there, null where the file has none."""
    parts = {part: _part(plain, part, where) for part in (*_NUMBERS,)}
    top, model, hardware, plan, measured = (parts[name] for name in ("", "model", "hardware", "plan", "measured"))
    for field in ("id", "source"):
        if not isinstance(top.get(field), str) or not top[field]:
            raise EchelonError(f"{where}: {field}={top.get(field)!r} is no text; every row has one")
    for field in ("group", "repeat_of"):
        if not isinstance(top.get(field), str | None):
            raise EchelonError(f"{where}: {field}={top[field]!r} is neither text nor null")
    lists: dict[str, tuple[str, ...]] = {}
    for field, values in (("counts", _COUNTS), ("unknown", _UNKNOWN)):
        given = top.get(field) or []
        if not isinstance(given, list):
            raise EchelonError(
                f"{where}: {field}={given!r} is no list; give one of {', '.join(values)}, or an empty one"
            )
        for value in given:
            _check(where, field, value, values)
        lists[field] = tuple(given)
    hardware |= {"intra": parts["hardware.intra"], "inter": parts["hardware.inter"]}
    _needed(top, model, measured, lists["counts"], where)
    _agree(top, plan, lists["unknown"], where)
    if model["arch"] in TRANSFORMERS:
        _shape(model, where)
    return Row(
        line=number,
        id=top["id"],
        source=top["source"],
        counts=lists["counts"],
        unknown=lists["unknown"],
        group=top.get("group"),
        repeat_of=top.get("repeat_of"),
        gpus=top["num_gpus"],
        model=model,
        hardware=hardware,
        plan=plan,
        measured=measured,
    )


def _part(plain: dict[str, Any], part: str, where: str) -> dict[str, Any]:
    """A part of the row, its values checked, with null for each field that is not there."""
    found: Any = plain
    for name in part.split(".") if part else ():
        found = found.get(name) or {}
        if not isinstance(found, dict):
            raise EchelonError(f"{where}: {part}={found!r} is no JSON object; docs/published.md tells what it holds")
    made = dict(found)
    vocabulary = _VOCABULARY.get(part, {})
    for field, values in vocabulary.items():
        _check(where, f"{part}.{field}".strip("."), made.setdefault(field, None), values)
    for fields, right, told in ((_NUMBERS, _positive, "number"), (_WHOLE, _counts, "whole number")):
        for field in fields.get(part, ()):
            value = made.setdefault(field, None)
            if value is not None and not right(value):
                name = f"{part}.{field}".strip(".")
                raise EchelonError(
                    f"{where}: {name}={value!r} is no {told} above 0; give one, or null where it is not known"
                )
    return made


def _needed(
    top: dict[str, Any], model: dict[str, Any], measured: dict[str, Any], counts: tuple[str, ...], where: str
) -> None:
    """What no forecast can do without, and what the row is scored on."""
    needed = {"num_gpus": top["num_gpus"]}
    if model["arch"] in TRANSFORMERS:
        needed |= {f"model.{name}": model[name] for name in _SHAPES if name not in _DERIVED}
    for count, field in (("time", "iteration_s"), ("rank", "iteration_s"), ("memory", "peak_mem_gib"), ("fit", "oom")):
        if count in counts:
            needed[f"measured.{field}"] = measured[field]
    for name, value in needed.items():
        if value is None:
            raise EchelonError(f"{where}: {name}=None, and a row of this kind needs it; give a number")


def _agree(top: dict[str, Any], plan: dict[str, Any], unknown: tuple[str, ...], where: str) -> None:
    """Axes make up the devices, micro-batches the batch; what is not said of them follows from the others."""
    axes = [plan[axis] for axis in ("dp", "tp", "pp", "cp")]
    gpus, product = top["num_gpus"], math.prod(axis or 1 for axis in axes)
    if "axes" not in unknown and (product != gpus if None not in axes else gpus % product):
        raise EchelonError(
            f"{where}: dp x tp x pp x cp is {product} and num_gpus={gpus}; they are the same, or the axes are in `unknown`"
        )
    _follow(plan, {"num_gpus": gpus}, "num_gpus", ("dp", "tp", "pp", "cp"))
    for name, parts in (
        ("global_batch", ("dp", "micro_batch", "grad_accum")),
        ("local_batch", ("micro_batch", "grad_accum")),
    ):
        found = _follow(plan, plan, name, parts)
        if found is not None and found != plan[name]:
            raise EchelonError(
                f"{where}: {' x '.join(parts)} is {found:g} and {name}={plan[name]}; they are the same, or one is null"
            )
    dp, local, batch = plan["dp"], plan["local_batch"], plan["global_batch"]
    if None not in (dp, local, batch) and dp * local != batch:
        raise EchelonError(
            f"{where}: dp x local_batch is {dp * local} and global_batch={batch}; they are the same, or one is null"
        )


def _follow(plan: dict[str, Any], totals: dict[str, Any], name: str, parts: tuple[str, ...]) -> float | None:
    """Where one of a product and its parts is missing it follows, if it is whole. The product, where all parts are there."""
    missing = [part for part in parts if plan[part] is None]
    product = math.prod(plan[part] or 1 for part in parts)
    total = totals[name]
    if not missing and total is None:
        totals[name] = product
    elif len(missing) == 1 and total is not None:
        if total % product:
            return total // product * product
        plan[missing[0]] = total // product
    return product if not missing else None


def _shape(model: dict[str, Any], where: str) -> None:
    """What a transformer's row leaves out follows from the rest of it; heads divide."""
    arch, hidden, heads = model["arch"], model["hidden"], model["heads"]
    if model["gated_mlp"] is None:
        model["gated_mlp"] = arch == "llama"
    model["kv_heads"] = model["kv_heads"] or heads
    model["head_dim"] = model["head_dim"] or max(hidden // heads, 1)
    # Llama's gated part is two thirds as wide, to be as large, rounded up to 256.
    model["ffn"] = model["ffn"] or (-(-8 * hidden // 3 // 256) * 256 if model["gated_mlp"] else 4 * hidden)
    if heads % model["kv_heads"]:
        raise EchelonError(f"{where}: model.kv_heads={model['kv_heads']} does not divide heads={heads}")
    if arch in ("llama", "nemotron") and model["head_dim"] % 2:
        raise EchelonError(
            f"{where}: model.head_dim={model['head_dim']}: rotary positions turn pairs of numbers; give an even one"
        )


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _counts(value: Any) -> bool:
    return type(value) is int and value > 0


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
