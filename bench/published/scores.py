"""The scores of forecasts against printed results, as docs/published.md defines them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from bench.published.cases import Outcome
from bench.published.rows import Row, sets

Outcomes = Mapping[str, Outcome]


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def time_errors(rows: Sequence[Row], found: Outcomes) -> dict[str, list[float]]:
    """By source: signed relative errors of the step time, a set of repeats once, at its median."""
    errors: dict[str, list[float]] = {}
    for alike in sets(row for row in rows if "time" in row.counts):
        measured = median(row.measured["iteration_s"] for row in alike)
        predicted = median(found[row.id].seconds for row in alike)
        errors.setdefault(alike[0].source, []).append(predicted / measured - 1)
    return errors


def time_scores(errors: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Macro-median and 90th percentile of |error|."""
    sizes = {source: [abs(error) for error in each] for source, each in errors.items()}
    return {
        "macro_median": mean(median(each) for each in sizes.values()),
        "p90": quantile([error for each in sizes.values() for error in each], 0.9),
    }


def ranks(values: Sequence[float]) -> list[float]:
    """Rank of each value, ties at their mean."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in order[start : end + 1]:
            found[place] = (start + end) / 2
        start = end + 1
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation of ranks; 0 where one side has no order."""
    x, y = ranks(a), ranks(b)
    mx, my = mean(x), mean(y)
    top = sum((p - mx) * (q - my) for p, q in zip(x, y, strict=True))
    bottom = math.sqrt(sum((p - mx) ** 2 for p in x) * sum((q - my) ** 2 for q in y))
    return top / bottom if bottom else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How well a group's plans are ranked, and what the chosen one costs."""

    group: str
    plans: int
    spearman: float
    regret: float | None  #: None: the chosen plan ran out of memory
    chosen: str


def choices(rows: Sequence[Row], found: Outcomes) -> list[Choice]:
    """Groups with at least three distinct plans."""
    groups: dict[str, list[list[Row]]] = {}
    for alike in sets(row for row in rows if "rank" in row.counts):
        groups.setdefault(alike[0].group or "", []).append(alike)
    result = []
    for group, plans in groups.items():
        if len(plans) < 3:
            continue
        measured = {alike[0].id: median(row.measured["iteration_s"] for row in alike) for alike in plans}
        order = spearman([found[name].seconds for name in measured], list(measured.values()))
        failed = {row.id for row in rows if row.group == group and row.measured["oom"]}
        all_of_them = {*measured, *failed}
        fitting = [name for name in all_of_them if found[name].fits] or list(all_of_them)
        fastest = min(found[name].seconds for name in fitting)
        tied = [name for name in fitting if found[name].seconds == fastest]
        worst = max(tied, key=lambda name: measured.get(name, math.inf))
        best = min(measured.values())
        result.append(
            Choice(
                group=group,
                plans=len(plans),
                spearman=order,
                regret=measured[worst] / best - 1 if worst in measured else None,
                chosen=worst,
            )
        )
    return result


def rank_scores(found: Sequence[Choice]) -> dict[str, float | None]:
    """Median correlation; median and worst regret; choices that ran out of memory. None: there is nothing to tell it by."""
    regrets = [each.regret for each in found if each.regret is not None]
    return {
        "groups": len(found),
        "spearman_median": median(each.spearman for each in found) if found else None,
        "regret_median": median(regrets) if regrets else None,
        "regret_worst": max(regrets) if regrets else None,
        "oom_choices": sum(each.regret is None for each in found),
    }


def fit_scores(rows: Sequence[Row], found: Outcomes) -> dict[str, float | None]:
    """Balanced accuracy of fits / ran out of memory, and the share of the latter that was said to fit; a set of repeats once."""
    failed, ran = [], []
    for alike in sets(row for row in rows if "fit" in row.counts):
        out = 2 * sum(bool(row.measured["oom"]) for row in alike) > len(alike)
        (failed if out else ran).append(found[alike[0].id].fits)
    wrong = sum(failed) / len(failed) if failed else None
    right = sum(ran) / len(ran) if ran else None
    return {
        "rows": len(failed) + len(ran),
        "balanced_accuracy": None if wrong is None or right is None else ((1 - wrong) + right) / 2,
        "false_fits": wrong,
        "false_oom": None if right is None else 1 - right,
    }


def memory_errors(rows: Sequence[Row], found: Outcomes) -> dict[str, list[float]]:
    """By source: signed relative errors of the peak, a set of repeats once, at its median."""
    errors: dict[str, list[float]] = {}
    for alike in sets(row for row in rows if "memory" in row.counts):
        measured = median(row.measured["peak_mem_gib"] for row in alike)
        errors.setdefault(alike[0].source, []).append(median(found[row.id].gib for row in alike) / measured - 1)
    return errors


def summary(rows: Sequence[Row], found: Outcomes) -> dict[str, Any]:
    """All scores."""
    errors = time_errors(rows, found)
    memory = memory_errors(rows, found)
    sizes = [abs(error) for each in memory.values() for error in each]
    return {
        "rows": len(rows),
        "time": time_scores(errors) | {"rows": sum(map(len, errors.values())), "sources": len(errors)} if errors else None,
        "time_by_source": {
            source: {
                "rows": len(each),
                "median_abs": median(map(abs, each)),
                "median": median(each),
                "p90_abs": quantile([abs(error) for error in each], 0.9),
            }
            for source, each in errors.items()
        },
        "rank": rank_scores(choices(rows, found)),
        "fit": fit_scores(rows, found),
        "memory": {"rows": len(sizes), "median_abs": median(sizes)} if sizes else None,
        "memory_by_source": {source: {"rows": len(each), "median_abs": median(map(abs, each)), "median": median(each)} for source, each in memory.items()},
    }  # fmt: skip
