"""Fitting the simulator's constants to published rows: step times first, then memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from statistics import median

import numpy
from scipy.optimize import differential_evolution, least_squares

from bench.published.cases import Case
from bench.published.rows import Row, sets
from echelon.simulator.calibration import FittedConstants, constant_bounds, fit_setting
from echelon.simulator.compute import PassCache
from echelon.simulator.cost.roofline import reserved_bytes, with_overheads
from echelon.simulator.memory import rank_memories
from echelon.simulator.rank_memory import RankMemory

#: Constants of memory; all others are of time.
MEMORY = ("slack", "cached", "context", "buffers", "spread", "unsure")
TIME = tuple(field.name for field in fields(FittedConstants) if field.name not in MEMORY)
#: Errors beyond this count less and less: rows that ran other physics than they print must not bend everything.
_ROBUST = 0.1
#: How strongly a constant is held to the middle of its range, in units of the range: decides only what the rows leave open.
_HOLD = 0.003
#: Where fits begin, in parts of each constant's range; the best of what they find counts.
STARTS = (0.5, 0.25, 0.75)
#: A fit ends where a step brings less than this, or after so many.
_ENOUGH, _STEPS = 1e-4, 60

#: Sets of repeats of one source that a fit looks at.
_MOST = 30

#: How near to a device's capacity a forecast of memory is neither right nor wrong, in parts of it.
_EDGE = 0.01
Cases = Mapping[str, Sequence[Case]]


def fit(rows: Sequence[Row], cases: Cases, starts: Sequence[float] = STARTS) -> FittedConstants:
    """The constants by these rows alone: nothing that was fitted before is looked at."""
    middle = FittedConstants(**{name: (low + high) / 2 for name, (low, high) in constant_bounds().items()})
    return fit_memory(rows, cases, fit_time(rows, cases, middle, starts))


def fit_time(rows: Sequence[Row], cases: Cases, first: FittedConstants, starts: Sequence[float]) -> FittedConstants:
    """Constants that bring the step times of `rows` nearest, every source weighing the same; those of memory as in `first`."""
    scored = spread_out(list(sets(row for row in rows if "time" in row.counts)))
    if not scored:
        return first
    sources = Counter(alike[0].source for alike in scored)
    targets = [
        (cases[alike[0].id], math.log(median(row.measured["iteration_s"] for row in alike)), 1 / math.sqrt(sources[alike[0].source]))
        for alike in scored
    ]  # fmt: skip
    low, high = (numpy.array([constant_bounds()[name][side] for name in TIME]) for side in (0, 1))

    def at(point: numpy.ndarray) -> FittedConstants:
        return replace(first, **dict(zip(TIME, map(float, low + point * (high - low)), strict=True)))

    def residuals(point: numpy.ndarray) -> numpy.ndarray:
        constants, known = at(point), dict[object, PassCache]()
        found = [
            weight * _soft(math.log(median(case.seconds(constants, known) for case in each)) - target)
            for each, target, weight in targets
        ]
        return numpy.array([*found, *(_HOLD * (point - 0.5))])

    answers = [
        least_squares(
            residuals, numpy.full(len(TIME), start), bounds=(0, 1), diff_step=1e-3, ftol=_ENOUGH, max_nfev=_STEPS
        )
        for start in starts
    ]
    return at(min(answers, key=lambda answer: answer.cost).x)


def spread_out(scored: list[list[Row]]) -> list[list[Row]]:
    """Of each source so many rows at most, evenly over its list: sources weigh the same anyway."""
    found: dict[str, list[list[Row]]] = {}
    for alike in scored:
        found.setdefault(alike[0].source, []).append(alike)
    return [alike for each in found.values() for alike in each[:: -(-len(each) // _MOST)]]


def _soft(error: float) -> float:
    """An error whose square grows with its logarithm once it is large (Cauchy's loss)."""
    return math.copysign(_ROBUST * math.sqrt(math.log1p((error / _ROBUST) ** 2)), error)


def fit_memory(rows: Sequence[Row], cases: Cases, first: FittedConstants) -> FittedConstants:
    """Constants that bring the peaks nearest and tell best what fits; the others as in `first`. `fits` is a step: found by trying, not
    by slopes. To call what failed possible is as bad as to call impossible what ran."""
    scored = [row for row in rows if {"memory", "fit"} & set(row.counts)]
    if not scored:
        return first
    held = [rank_memories(cases[row.id][0].layout) for row in scored]
    begins = numpy.cumsum([0, *map(len, held)])[:-1]
    # Places of each row's ranks; rows that have fewer repeat their first.
    most, lines = max(map(len, held)), numpy.arange(len(held))
    ranks = numpy.array(
        [[begin + (n if n < len(each) else 0) for n in range(most)] for begin, each in zip(begins, held, strict=True)]
    )
    parts = together([each for row in held for each in row])
    capacity = numpy.array([cases[row.id][0].costs(first).capacity for row in scored])
    of = numpy.repeat(capacity, [len(row) for row in held])
    on_card = numpy.array([row.measured.get("mem_kind") != "reserved" for row in scored])
    printed = numpy.array(
        [row.measured["peak_mem_gib"] or numpy.nan if "memory" in row.counts else numpy.nan for row in scored]
    )
    failed, judged = (
        numpy.array([bool(row.measured["oom"]) for row in scored]),
        numpy.array(["fit" in row.counts for row in scored]),
    )
    names = [row.source if "memory" in row.counts else "" for row in scored]
    printing = [[place for place, name in enumerate(names) if name == source] for source in sorted({*names} - {""})]
    low, high = (numpy.array([constant_bounds()[name][side] for name in MEMORY]) for side in (0, 1))
    strength = fit_setting("hold")

    def loss(point: numpy.ndarray) -> float:
        constants = replace(first, **dict(zip(MEMORY, map(float, point), strict=True)))
        memory = with_overheads(parts, constants)
        # As forecasts do: the rank that may need most tells all.
        needed = memory.high + memory.framework
        places = ranks[lines, numpy.argmax(needed[ranks], axis=1)]
        upper = needed[places]
        kept = reserved_bytes(memory, of, constants)[places]
        shown = kept + memory.framework[places] * on_card
        errors = numpy.abs(numpy.log(shown / 2**30 / printed))
        # Smooth near the edge, so that a rare row does not decide.
        margin = numpy.clip(numpy.log(upper / capacity) / _EDGE, -50, 50)
        fits = 1 / (1 + numpy.exp(margin))
        wrong = [numpy.mean(each) if each.size else 0.0 for each in (fits[judged & failed], 1 - fits[judged & ~failed])]
        # Every source weighs the same.
        error = sum(float(numpy.mean(errors[each])) for each in printing) / max(len(printing), 1)
        # What the rows leave open stays in the middle of its range.
        open_ = strength * float(numpy.mean(numpy.abs((point - low) / (high - low) - 0.5)))
        return float(error + sum(wrong)) + open_

    answer = differential_evolution(loss, list(zip(low, high, strict=True)), rng=0, maxiter=60, popsize=12, tol=1e-6)
    return replace(first, **dict(zip(MEMORY, map(float, answer.x), strict=True)))


def together(ranks: Sequence[RankMemory]) -> RankMemory:
    """What many ranks hold as arrays, so that they are put together at once."""
    names = [field.name for field in fields(RankMemory) if not isinstance(getattr(ranks[0], field.name), str)]
    return RankMemory(**{name: numpy.array([getattr(each, name) for each in ranks]) for name in names})
