"""Fitting the simulator's constants to published rows: step times first, then memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from statistics import median

import numpy
from scipy.optimize import least_squares, minimize

from bench.published.cases import Case
from bench.published.rows import Row, sets
from echelon.simulator.fitted import Fitted, bounds, fitted
from echelon.simulator.held import memory

#: Constants of memory; all others are of time.
MEMORY = ("slack", "context", "buffers", "spread")
TIME = tuple(field.name for field in fields(Fitted) if field.name not in MEMORY)
#: Errors beyond this count less and less: rows that ran other physics than they print must not bend everything.
_ROBUST = 0.1
#: How strongly a constant is held to its present value, in units of its range: decides only what the rows leave open.
_HOLD = 0.003

#: Rows of one source that a fit looks at.
_MOST = 30

Cases = Mapping[str, Sequence[Case]]


def fit_time(rows: Sequence[Row], cases: Cases, start: Fitted | None = None, *, rounds: int = 30) -> Fitted:
    """Constants that bring the step times of `rows` nearest, every source weighing the same."""
    first = start or fitted()
    scored = spread_out(list(sets(row for row in rows if "time" in row.counts)))
    sources = Counter(alike[0].source for alike in scored)
    targets = [
        (cases[alike[0].id][0], math.log(median(row.measured["iteration_s"] for row in alike)), 1 / math.sqrt(sources[alike[0].source]))
        for alike in scored
    ]  # fmt: skip
    low, high = (numpy.array([bounds()[name][side] for name in TIME]) for side in (0, 1))
    middle = numpy.array([getattr(first, name) for name in TIME])

    def residuals(point: numpy.ndarray) -> numpy.ndarray:
        constants = replace(first, **dict(zip(TIME, map(float, low + point * (high - low)), strict=True)))
        found = [weight * _soft(math.log(case.seconds(constants)) - target) for case, target, weight in targets]
        return numpy.array([*found, *(_HOLD * (point - begin))])

    begin = numpy.clip((middle - low) / (high - low), 0.001, 0.999)
    answer = least_squares(residuals, begin, bounds=(0, 1), diff_step=1e-3, max_nfev=rounds)
    return replace(first, **dict(zip(TIME, map(float, low + answer.x * (high - low)), strict=True)))


def spread_out(scored: list[list[Row]]) -> list[list[Row]]:
    """Of each source so many rows at most, evenly over its list: sources weigh the same anyway."""
    found: dict[str, list[list[Row]]] = {}
    for alike in scored:
        found.setdefault(alike[0].source, []).append(alike)
    return [alike for each in found.values() for alike in each[:: -(-len(each) // _MOST)]]


def _soft(error: float) -> float:
    """An error whose square grows with its logarithm once it is large (Cauchy's loss)."""
    return math.copysign(_ROBUST * math.sqrt(math.log1p((error / _ROBUST) ** 2)), error)


def fit_memory(rows: Sequence[Row], cases: Cases, start: Fitted | None = None) -> Fitted:
    """Constants that bring the peaks nearest and tell best what fits. `fits` is a step: found by trying, not by slopes."""
    first = start or fitted()
    measured = [row for row in rows if "memory" in row.counts]
    judged = [row for row in rows if "fit" in row.counts]
    ranges = [bounds()[name] for name in MEMORY]

    def loss(point: Sequence[float]) -> float:
        values = [low + min(max(x, 0.0), 1.0) * (high - low) for x, (low, high) in zip(point, ranges, strict=True)]
        constants = replace(first, **dict(zip(MEMORY, values, strict=True)))
        errors = []
        for row in measured:
            held, _ = memory(cases[row.id][0].layout, constants)
            size = held.peak + held.framework * (row.measured["mem_kind"] != "reserved")
            errors.append(abs(math.log(size / 2**30 / row.measured["peak_mem_gib"])))
        wrong = {True: [0.0, 0], False: [0.0, 0]}
        for row in judged:
            case = cases[row.id][0]
            held, _ = memory(case.layout, constants)
            margin = math.log((held.high + held.framework) / case.layout.capacity)
            oom = bool(row.measured["oom"])
            # Smooth near the edge, so that the search has a slope.
            wrong[oom][0] += 1 / (1 + math.exp((margin if oom else -margin) / 0.02))
            wrong[oom][1] += 1
        rates = {key: total / count if count else 0.0 for key, (total, count) in wrong.items()}
        error = sum(errors) / len(errors) if errors else 0.0
        return error + rates[True] + rates[False] + max(rates[True] - 0.05, 0.0)

    begin = [(getattr(first, name) - low) / (high - low) for name, (low, high) in zip(MEMORY, ranges, strict=True)]
    answer = minimize(loss, begin, method="Nelder-Mead", options={"maxiter": 120, "initial_simplex": _simplex(begin)})
    values = [low + min(max(x, 0.0), 1.0) * (high - low) for x, (low, high) in zip(answer.x, ranges, strict=True)]
    return replace(first, **dict(zip(MEMORY, map(float, values), strict=True)))


def _simplex(begin: Sequence[float]) -> list[list[float]]:
    return [
        list(begin),
        *([x + 0.15 * (place == moved) for place, x in enumerate(begin)] for moved in range(len(begin))),
    ]
