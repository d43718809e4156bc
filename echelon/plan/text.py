"""The plan's short form, for people and the command line: `dp=2 zero=3 micro=8`. Both ways, exactly.

What stands at its default is left out, except dp. The model that a plan was made for, and how it is cut over tp and pp, do not fit a
short form: the file has them, and they are found again for a plan without.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_args

from echelon.errors import PlanError
from echelon.plan.mesh import Mesh
from echelon.plan.plan import GROUPS, BatchNorm, ExchangeMode, Plan, Precision, Recompute, Schedule

_AXES = tuple(field.name for field in fields(Mesh))
_INT_FIELDS = ("zero", "micro", "threads", "bucket", "servers", "replicas", "rows")
_SHARES_FIELD, _STALENESS_FIELD = "shares", "staleness"
_CHOICE_FIELDS = {
    "precision": get_args(Precision),
    "batchnorm": get_args(BatchNorm),
    "schedule": get_args(Schedule),
    "recompute": get_args(Recompute),
    "exchange": get_args(ExchangeMode),
    "dense": get_args(ExchangeMode),
}
#: word in the text -> (field, value): a switch away from the default.
_FLAGS = {
    "keep": ("keep_gradients", True),
    "whole": ("shard_as_one", True),
    "sequence": ("sequence", True),
    "compile": ("compile", True),
    "unfused": ("fused", False),
}
#: word in the text -> field, where they differ.
_FIELDS = {"bucket": "bucket_megabytes", "rows": "min_table_rows", "shares": "batch_shares"}


def to_text(plan: Plan) -> str:
    """`plan` in short form."""
    default_plan = Plan()
    parts = [f"{axis}={getattr(plan.mesh, axis)}" for axis in _AXES if axis == "dp" or getattr(plan.mesh, axis) != 1]
    for name in (*_INT_FIELDS, *_CHOICE_FIELDS):
        field = _FIELDS.get(name, name)
        if plan.get(field) != default_plan.get(field):
            parts.append(f"{name}={plan.get(field)}")
    if plan.server.staleness != default_plan.server.staleness:
        parts.append(f"staleness={'none' if plan.server.staleness is None else plan.server.staleness}")
    parts += [f"shares={':'.join(map(str, plan.data.batch_shares))}"] if plan.data.batch_shares else []
    parts += [word for word, (name, value) in _FLAGS.items() if plan.get(name) == value]
    return " ".join(parts)


def from_text(text: str) -> Plan:
    """The plan that a short form describes; words are separated by spaces or commas."""
    plan_values: dict[str, Any] = {}
    mesh_sizes: dict[str, int] = {}
    for word in re.split(r"[,\s]+", text.strip()):
        name, equals, value = word.partition("=")
        if not word:
            continue
        if name in mesh_sizes or name in plan_values:
            raise PlanError(f"plan {text!r}: {name} is given twice")
        if name in _FLAGS and not equals:
            field, setting = _FLAGS[name]
            plan_values[field] = setting
        elif name in _AXES and equals:
            mesh_sizes[name] = _parse_int(text, name, value)
        elif name in _INT_FIELDS and equals:
            plan_values[name] = _parse_int(text, name, value)
        elif name == _SHARES_FIELD and equals:
            if not re.fullmatch(r"\d+(:\d+)*", value):
                raise PlanError(
                    f"plan {text!r}: shares={value!r}: whole numbers with colons between them, one per data rank: 3:1"
                )
            plan_values[name] = tuple(map(int, value.split(":")))
        elif name == _STALENESS_FIELD and equals:
            plan_values[name] = None if value == "none" else _parse_int(text, name, value)
        elif name in _CHOICE_FIELDS and equals:
            if value not in _CHOICE_FIELDS[name]:
                raise PlanError(f"plan {text!r}: {name}={value!r} is not one of {', '.join(_CHOICE_FIELDS[name])}")
            plan_values[name] = value
        elif name in (*_AXES, *_INT_FIELDS, *_CHOICE_FIELDS, _SHARES_FIELD, _STALENESS_FIELD):
            raise PlanError(f"plan {text!r}: {_missing_value_message(name)}")
        else:
            raise PlanError(f"plan {text!r}: {word!r} is not part of a plan{_suggestion(name)}")
    try:
        return Plan(mesh=Mesh(**mesh_sizes)).replace(
            **{_FIELDS.get(name, name): value for name, value in plan_values.items()}
        )
    except ValueError as error:
        raise PlanError(f"plan {text!r}: {error}") from error


def _parse_int(text: str, name: str, value: str) -> int:
    if not value:
        raise PlanError(f"plan {text!r}: {_missing_value_message(name)}")
    if not value.isdecimal():
        raise PlanError(f"plan {text!r}: {name}={value!r} is not a whole number")
    return int(value)


def _missing_value_message(name: str) -> str:
    if name == _SHARES_FIELD:
        return "shares needs a number for each data rank: shares=3:1, without spaces"
    if name == _STALENESS_FIELD:
        return "staleness needs a number of steps, or none: staleness=4, without spaces"
    if name in _CHOICE_FIELDS:
        return (
            f"{name} needs one of {', '.join(_CHOICE_FIELDS[name])}: {name}={_CHOICE_FIELDS[name][0]}, without spaces"
        )
    return f"{name} needs a number: {name}={2 if name in _AXES else 1}, without spaces"


def _suggestion(name: str) -> str:
    known_words = [
        *(f"{axis}=2" for axis in _AXES),
        *(f"{number}=1" for number in _INT_FIELDS),
        *_CHOICE_FIELDS,
        _SHARES_FIELD,
        _STALENESS_FIELD,
        *_FLAGS,
    ]
    close_matches = difflib.get_close_matches(
        name.lower(), [*_AXES, *_INT_FIELDS, *_CHOICE_FIELDS, _SHARES_FIELD, _STALENESS_FIELD, *_FLAGS], 1
    )
    return f"; did you mean {close_matches[0]}?" if close_matches else f"; a plan is made of {' '.join(known_words)}"


def describe_plan(plan: Plan, batch: int | None = None) -> str:
    """The plan in words, one decision a line."""
    from echelon.plan.batch_split import count_micro_batches, largest_micro_batch
    from echelon.plan.describe import fold_index_ranges
    from echelon.plan.stages import stage_count

    ranks, dp = plan.ranks, plan.mesh.dp
    if ranks == 1:
        lines = ["one process"]
    elif ranks == dp:
        lines = [f"{ranks} ranks, each with its own samples"]
    else:
        lines = [f"{ranks} ranks, {'all' if dp == 1 else f'each {ranks // dp} of them'} with the same samples"]
    if plan.mesh.tp > 1:
        lines.append(f"tp={plan.mesh.tp}: modules are cut into {plan.mesh.tp} parts, one on each rank of the axis")
    if plan.tensor.sequence:
        where = "; ".join(", ".join(fold_index_ranges(each.blocks)) for each in plan.tensor.segments)
        lines.append(
            f"each rank has a part of the sequence{f' in {where}' if where else ''}, but where modules need the whole"
        )
    if plan.mesh.pp > 1:
        total_stages = stage_count(plan)
        each = f", {total_stages // plan.mesh.pp} on each rank" if total_stages > plan.mesh.pp else ""
        lines.append(
            f"pp={plan.mesh.pp}: {total_stages} stages, one after another{each}, in the order of {plan.pipeline.schedule}"
        )
    lines += [f"{axis}={getattr(plan.mesh, axis)}" for axis in ("cp", "ep") if getattr(plan.mesh, axis) > 1]
    if dp > 1 and plan.server.dense == "allreduce":
        lines.append(_ZERO_DESCRIPTIONS[plan.zero])
    if plan.uses_servers:
        lines += _describe_servers(plan)
    if plan.data.batch_shares:
        lines.append(f"the data ranks have unequal shares of the batch: {' : '.join(map(str, plan.data.batch_shares))}")
    if plan.data.keep_gradients:
        lines.append("full gradients are kept between micro-batches: one exchange per step")
    if batch is not None and batch < dp:
        lines.append(f"a batch of {batch} cannot feed {dp} data ranks")
    elif batch is not None:
        micro_batch_count = count_micro_batches(batch, dp, plan.micro, plan.data.batch_shares)
        largest_micro = largest_micro_batch(batch, dp, plan.micro, plan.data.batch_shares)
        lines.append(
            f"a batch of {batch} is {micro_batch_count} micro-batch{'es' * (micro_batch_count > 1)} of up to {_pluralize(largest_micro, 'sample')} per rank"
        )
    elif plan.micro:
        lines.append(f"micro-batches of {_pluralize(plan.micro, 'sample')} per rank")
    lines.append(
        f"computes in {plan.precision or 'the precision of the job'}"
        + (", compiled" if plan.compile else "")
        + ("" if plan.fused else ", optimizer kernels not fused")
    )
    if plan.recompute != "none":
        saved = (
            "only its input"
            if plan.recompute == "block"
            else "its input and the outputs of its products and attentions"
        )
        lines.append(f"each block keeps {saved} and is computed again in backward")
    if plan.batchnorm == "sync":
        lines.append("batch-norm statistics are taken over all ranks")
    if plan.threads:
        lines.append(f"{_pluralize(plan.threads, 'CPU thread')} per rank")
    return "\n".join(lines)


def _describe_servers(plan: Plan) -> Iterator[str]:
    """What the servers do, in words."""
    table_list = (
        f": {', '.join(table.path or 'the model itself' for table in plan.server.tables)}" if plan.server.tables else ""
    )
    copies = f", each row on {plan.server.replicas} of them" if plan.server.replicas > 1 else ""
    rest = " and all other parameters" if plan.server.dense == "server" else ""
    yield f"{_pluralize(plan.server.servers, 'server')} of parameters {'holds' if plan.server.servers == 1 else 'hold'} the tables{table_list}{rest}{copies}"
    if plan.server.staleness is None:
        yield "ranks read what is there and never wait for each other: asynchronous"
    elif plan.server.staleness:
        yield f"a rank reads once it is no more than {_pluralize(plan.server.staleness, 'step')} ahead of the slowest"
    else:
        yield "all ranks' gradients of a step are added up and applied once: synchronous"


def _pluralize(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


_ZERO_DESCRIPTIONS = (
    "every rank holds the whole model; gradients are all-reduced in buckets while backward runs",
    "optimizer state is sharded; gradients are reduced once and parameters gathered once a step",
    "optimizer state and gradients are sharded; gradients are reduced every micro-batch",
    "parameters, gradients and optimizer state are sharded; each block is gathered when it is needed",
)


def diff_plans(left: Plan, right: Plan) -> list[str]:
    """What differs between two plans, field by field, both sides named; empty when they are equal."""

    def format_value(value: object) -> object:
        if isinstance(value, tuple) and value and not isinstance(value[0], int):  # hundreds of modules
            return f"{len(value)} module{'s' * (len(value) > 1)}"
        return list(value) if isinstance(value, tuple) else value

    def flatten_plan(plan: Plan) -> dict[str, object]:
        names = [*(item.name for item in fields(Plan) if item.name not in ("mesh", *GROUPS.values())), *GROUPS]
        rest = {name: plan.get(name) for name in names}
        return {axis: getattr(plan.mesh, axis) for axis in _AXES} | rest

    left_values, right_values = flatten_plan(left), flatten_plan(right)
    return [
        f"{name}: {format_value(left_values[name])} -> {format_value(right_values[name])}"
        for name in left_values
        if left_values[name] != right_values[name]
    ]
