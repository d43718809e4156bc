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
from echelon.plan.plan import BatchNorm, Plan, Precision, Recompute, Schedule, Way

_AXES = tuple(field.name for field in fields(Mesh))
_NUMBERS = ("zero", "micro", "threads", "bucket", "servers", "replicas", "rows")
_SHARES, _STALENESS = "shares", "staleness"
_WORDS = {
    "precision": get_args(Precision),
    "batchnorm": get_args(BatchNorm),
    "schedule": get_args(Schedule),
    "recompute": get_args(Recompute),
    "exchange": get_args(Way),
    "dense": get_args(Way),
}
#: word in the text -> (field, value): a switch away from the default.
_SWITCHES = {
    "keep": ("keep_gradients", True),
    "whole": ("whole", True),
    "sequence": ("sequence", True),
    "compile": ("compile", True),
    "unfused": ("fused", False),
}


def to_text(plan: Plan) -> str:
    """`plan` in short form."""
    plain = Plan()
    words = [f"{axis}={getattr(plan.mesh, axis)}" for axis in _AXES if axis == "dp" or getattr(plan.mesh, axis) != 1]
    for name in (*_NUMBERS, *_WORDS):
        if getattr(plan, name) != getattr(plain, name):
            words.append(f"{name}={getattr(plan, name)}")
    if plan.staleness != plain.staleness:
        words.append(f"staleness={'none' if plan.staleness is None else plan.staleness}")
    words += [f"shares={':'.join(map(str, plan.shares))}"] if plan.shares else []
    words += [word for word, (name, value) in _SWITCHES.items() if getattr(plan, name) == value]
    return " ".join(words)


def from_text(text: str) -> Plan:
    """The plan that a short form describes; words are separated by spaces or commas."""
    given: dict[str, Any] = {}
    axes: dict[str, int] = {}
    for word in re.split(r"[,\s]+", text.strip()):
        name, equals, value = word.partition("=")
        if not word:
            continue
        if name in axes or name in given:
            raise PlanError(f"plan {text!r}: {name} is given twice")
        if name in _SWITCHES and not equals:
            field, setting = _SWITCHES[name]
            given[field] = setting
        elif name in _AXES and equals:
            axes[name] = _number(text, name, value)
        elif name in _NUMBERS and equals:
            given[name] = _number(text, name, value)
        elif name == _SHARES and equals:
            if not re.fullmatch(r"\d+(:\d+)*", value):
                raise PlanError(
                    f"plan {text!r}: shares={value!r}: whole numbers with colons between them, one per data rank: 3:1"
                )
            given[name] = tuple(map(int, value.split(":")))
        elif name == _STALENESS and equals:
            given[name] = None if value == "none" else _number(text, name, value)
        elif name in _WORDS and equals:
            if value not in _WORDS[name]:
                raise PlanError(f"plan {text!r}: {name}={value!r} is not one of {', '.join(_WORDS[name])}")
            given[name] = value
        elif name in (*_AXES, *_NUMBERS, *_WORDS, _SHARES, _STALENESS):
            raise PlanError(f"plan {text!r}: {_needs(name)}")
        else:
            raise PlanError(f"plan {text!r}: {word!r} is not part of a plan{_meant(name)}")
    try:
        return Plan(mesh=Mesh(**axes), **given)
    except ValueError as error:
        raise PlanError(f"plan {text!r}: {error}") from error


def _number(text: str, name: str, value: str) -> int:
    if not value:
        raise PlanError(f"plan {text!r}: {_needs(name)}")
    if not value.isdecimal():
        raise PlanError(f"plan {text!r}: {name}={value!r} is not a whole number")
    return int(value)


def _needs(name: str) -> str:
    if name == _SHARES:
        return "shares needs a number for each data rank: shares=3:1, without spaces"
    if name == _STALENESS:
        return "staleness needs a number of steps, or none: staleness=4, without spaces"
    if name in _WORDS:
        return f"{name} needs one of {', '.join(_WORDS[name])}: {name}={_WORDS[name][0]}, without spaces"
    return f"{name} needs a number: {name}={2 if name in _AXES else 1}, without spaces"


def _meant(name: str) -> str:
    known = [
        *(f"{axis}=2" for axis in _AXES),
        *(f"{number}=1" for number in _NUMBERS),
        *_WORDS,
        _SHARES,
        _STALENESS,
        *_SWITCHES,
    ]
    near = difflib.get_close_matches(name.lower(), [*_AXES, *_NUMBERS, *_WORDS, _SHARES, _STALENESS, *_SWITCHES], 1)
    return f"; did you mean {near[0]}?" if near else f"; a plan is made of {' '.join(known)}"


def explain(plan: Plan, batch: int | None = None) -> str:
    """The plan in words, one decision a line."""
    from echelon.plan.batch_split import largest_micro, rounds
    from echelon.plan.describe import runs
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
    if plan.sequence:
        where = "; ".join(", ".join(runs(each.units)) for each in plan.segments)
        lines.append(
            f"each rank has a part of the sequence{f' in {where}' if where else ''}, but where modules need the whole"
        )
    if plan.mesh.pp > 1:
        stages = stage_count(plan)
        each = f", {stages // plan.mesh.pp} on each rank" if stages > plan.mesh.pp else ""
        lines.append(f"pp={plan.mesh.pp}: {stages} stages, one after another{each}, in the order of {plan.schedule}")
    lines += [f"{axis}={getattr(plan.mesh, axis)}" for axis in ("cp", "ep") if getattr(plan.mesh, axis) > 1]
    if dp > 1 and plan.dense == "allreduce":
        lines.append(_ZERO[plan.zero])
    if plan.served:
        lines += _served(plan)
    if plan.shares:
        lines.append(f"the data ranks have unequal shares of the batch: {' : '.join(map(str, plan.shares))}")
    if plan.keep_gradients:
        lines.append("full gradients are kept between micro-batches: one exchange per step")
    if batch is not None and batch < dp:
        lines.append(f"a batch of {batch} cannot feed {dp} data ranks")
    elif batch is not None:
        turns = rounds(batch, dp, plan.micro, plan.shares)
        most = largest_micro(batch, dp, plan.micro, plan.shares)
        lines.append(
            f"a batch of {batch} is {turns} micro-batch{'es' * (turns > 1)} of up to {_of(most, 'sample')} per rank"
        )
    elif plan.micro:
        lines.append(f"micro-batches of {_of(plan.micro, 'sample')} per rank")
    lines.append(
        f"computes in {plan.precision or 'the precision of the job'}"
        + (", compiled" if plan.compile else "")
        + ("" if plan.fused else ", optimizer kernels not fused")
    )
    if plan.recompute != "none":
        kept = (
            "only its input"
            if plan.recompute == "block"
            else "its input and the outputs of its products and attentions"
        )
        lines.append(f"each block keeps {kept} and is computed again in backward")
    if plan.batchnorm == "sync":
        lines.append("batch-norm statistics are taken over all ranks")
    if plan.threads:
        lines.append(f"{_of(plan.threads, 'CPU thread')} per rank")
    return "\n".join(lines)


def _served(plan: Plan) -> Iterator[str]:
    """What the servers do, in words."""
    held = f": {', '.join(each.path or 'the model itself' for each in plan.tables)}" if plan.tables else ""
    copies = f", each row on {plan.replicas} of them" if plan.replicas > 1 else ""
    rest = " and all other parameters" if plan.dense == "server" else ""
    yield f"{_of(plan.servers, 'server')} of parameters {'holds' if plan.servers == 1 else 'hold'} the tables{held}{rest}{copies}"
    if plan.staleness is None:
        yield "ranks read what is there and never wait for each other: asynchronous"
    elif plan.staleness:
        yield f"a rank reads once it is no more than {_of(plan.staleness, 'step')} ahead of the slowest"
    else:
        yield "all ranks' gradients of a step are added up and applied once: synchronous"


def _of(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"


_ZERO = (
    "every rank holds the whole model; gradients are all-reduced in buckets while backward runs",
    "optimizer state is sharded; gradients are reduced once and parameters gathered once a step",
    "optimizer state and gradients are sharded; gradients are reduced every micro-batch",
    "parameters, gradients and optimizer state are sharded; each block is gathered when it is needed",
)


def diff(left: Plan, right: Plan) -> list[str]:
    """What differs between two plans, field by field, both sides named; empty when they are equal."""

    def shown(value: object) -> object:
        if isinstance(value, tuple) and value and not isinstance(value[0], int):  # hundreds of modules
            return f"{len(value)} module{'s' * (len(value) > 1)}"
        return list(value) if isinstance(value, tuple) else value

    def flat(plan: Plan) -> dict[str, object]:
        rest = {field.name: getattr(plan, field.name) for field in fields(Plan) if field.name != "mesh"}
        return {axis: getattr(plan.mesh, axis) for axis in _AXES} | rest

    here, there = flat(left), flat(right)
    return [f"{name}: {shown(here[name])} -> {shown(there[name])}" for name in here if here[name] != there[name]]
