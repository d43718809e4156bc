"""`python -m bench.published [ROWS.jsonl] [--json OUT] [--chart OUT.svg] [--leave-one-out] [--fit FILE]`: printed runs, forecast and scored."""

from __future__ import annotations

import argparse
import json
import sys
import time as clock
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.published.cases import Case, Outcome, outcome
from bench.published.chart import draw
from bench.published.fit import STARTS, fit
from bench.published.prepare import prepared
from bench.published.rows import ROWS, Refused, Row, scan
from bench.published.scores import choices, summary
from echelon.errors import EchelonError
from echelon.simulator.calibration import FittedConstants, format_constants_file, load_constants, round_constants


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit 1 where some rows were refused (the others are forecast all the same), 2 where the file cannot be read or has no row."""
    parser = argparse.ArgumentParser(prog="python -m bench.published", description=__doc__)
    parser.add_argument("rows", nargs="?", default=ROWS, help="rows of published runs, one JSON object a line")
    parser.add_argument("--json", metavar="OUT", help="write every forecast and all scores there")
    parser.add_argument("--chart", metavar="OUT", help="draw forecast against printed step time there (.svg or .png)")
    parser.add_argument("--leave-one-out", action="store_true", help="fit without each source, forecast it")
    parser.add_argument(
        "--fit", metavar="FILE", help="fit the constants to these rows, forecast with them, and write them there"
    )
    parser.add_argument("--quiet", action="store_true", help="print the scores only")
    given = parser.parse_args(arguments)
    try:
        rows, refused = scan(given.rows)
    except EchelonError as error:
        print(error, file=sys.stderr)
        return 2
    begun = clock.perf_counter()
    made, failed = laid_out(rows)
    refused += failed
    rows = [row for row in rows if row.id in made]
    profiled = clock.perf_counter() - begun
    for each in refused:
        print(each.reason, file=sys.stderr)
    if not rows and not refused:
        print(f"{given.rows}: no row in it; one JSON object a line is wanted", file=sys.stderr)
    constants = round_constants(fit(rows, made)) if given.fit else load_constants()
    if given.fit:
        Path(given.fit).write_text(format_constants_file(constants), encoding="utf-8")
    begun = clock.perf_counter()
    found = {row.id: outcome(row, made[row.id], constants) for row in rows}
    took = clock.perf_counter() - begun
    if not given.quiet:
        table(rows, found)
    scores = summary(rows, found)
    if given.leave_one_out:
        scores["leave_one_out"] = left_out(rows, made, constants)
    report(rows, found, scores)
    print(f"{len(rows)} rows, {len(refused)} refused: profiles {profiled:.0f} s, forecasts {took:.1f} s")
    if given.chart:
        print(f"{given.chart}: {draw(rows, found, given.chart)} points")
    if given.json:
        whole = {
            "rows": [plain(row, found[row.id]) for row in rows],
            "refused": [asdict(each) for each in refused],
            "summary": scores,
        }
        Path(given.json).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if not rows:
        return 2
    return 1 if refused else 0


def laid_out(rows: Sequence[Row]) -> tuple[dict[str, list[Case]], list[Refused]]:
    """The cases of each row, and the rows of which no model or plan can be made."""
    made: dict[str, list[Case]] = {}
    refused = []
    found = prepared(rows)
    for row in rows:
        each = found[row.id]
        if isinstance(each, EchelonError):
            refused.append(Refused(line=row.line, id=row.id, reason=f"line {row.line}: {row.id}: {each}"))
        else:
            made[row.id] = each
    return made, refused


def left_out(
    rows: list[Row], made: dict[str, list[Case]], everything: FittedConstants, starts: Sequence[float] = STARTS
) -> dict[str, Any]:
    """Scores of forecasts by constants that were fitted without the source that they are for. `everything`: those of all rows, for
    sources of which nothing is scored, so that leaving them out changes nothing."""
    found: dict[str, Outcome] = {}
    for source in dict.fromkeys(row.source for row in rows):
        others = [row for row in rows if row.source != source]
        counted = [row for row in rows if row.source == source and row.counts]
        constants = fit(others, made, starts) if counted else everything
        found |= {row.id: outcome(row, made[row.id], constants) for row in rows if row.source == source}
    return summary(rows, found)


def plain(row: Row, found: Outcome) -> dict[str, Any]:
    """A row's forecast for the JSON file."""
    made: dict[str, Any] = {
        "id": row.id,
        "predicted_s": found.seconds,
        "predicted_gib": found.gib,
        "fits": found.fits,
        "predicted_samples_per_s": found.samples / found.seconds,
    }
    if found.seconds_range[0] != found.seconds_range[1]:
        made["range_s"] = found.seconds_range
        made["range_samples_per_s"] = [found.samples / found.seconds_range[1], found.samples / found.seconds_range[0]]
    if found.gib_range[0] != found.gib_range[1]:
        made["range_gib"] = found.gib_range
    if not found.every:
        made["range_fits"] = [False, True]
    if found.notes:
        made["notes"] = found.notes
    return made


def table(rows: list[Row], found: dict[str, Outcome]) -> None:
    """Every row: forecast against printed."""
    print(
        f"{'row':16} {'scored on':24} {'forecast s':>12} {'printed s':>10} {'error':>7} {'GiB':>6} {'printed':>7} fits"
    )
    for row in rows:
        each, measured = found[row.id], row.measured
        printed, low, high = measured["iteration_s"], *each.seconds_range
        seconds = f"{each.seconds:12.3f}" if low == high else f"{low:.3g}-{high:.3g}".rjust(12)
        error = f"{each.seconds / printed - 1:+7.1%}" if printed else " " * 7
        held = f"{measured['peak_mem_gib']:7.1f}" if measured["peak_mem_gib"] else " " * 7
        ran = {True: "ran out", False: "ran", None: ""}[measured["oom"]]
        said = "fits" if each.fits else "does not fit"
        if measured.get("samples_per_s"):
            ran += f"; {each.samples / high:.0f}-{each.samples / low:.0f} samples/s, printed {measured['samples_per_s']:.0f}"
        scored = ",".join(row.counts) or "(apart)"
        print(f"{row.id:16} {scored:24} {seconds} {printed or 0:10.3f} {error} {each.gib:6.1f} {held} {said}, {ran}")
        for note in each.notes:
            print(f"{'':16} {note}")


def report(rows: list[Row], found: dict[str, Outcome], scores: dict[str, Any]) -> None:
    """The scores for people."""
    left = scores.get("leave_one_out")
    print("\nstep time by source (|error| median, signed median, 90th percentile; left out)")
    for source, each in scores["time_by_source"].items():
        apart = left["time_by_source"][source] if left else None
        behind = (
            f"   left out {apart['median_abs']:6.1%} {apart['median']:+7.1%} {apart['p90_abs']:6.1%}" if apart else ""
        )
        print(
            f"  {each['rows']:4d}  {each['median_abs']:6.1%} {each['median']:+7.1%} {each['p90_abs']:6.1%}{behind}  {source}"
        )
    for name, group in (("in sample", scores), ("left out", left)):
        if not group:
            continue
        time, rank, fit, memory = group["time"], group["rank"], group["fit"], group["memory"]
        if time:
            print(
                f"{name}: time macro-median {time['macro_median']:.1%}, p90 {time['p90']:.1%} ({time['rows']} sets of repeats, "
                f"{time['sources']} sources)"
            )
        if rank["groups"]:
            print(
                f"{name}: rank: Spearman {rank['spearman_median']:.3f} over {rank['groups']} groups; regret median "
                f"{_share(rank['regret_median'])}, worst {_share(rank['regret_worst'])}, choices that ran out of memory {rank['oom_choices']}"
            )
        if fit["rows"]:
            print(
                f"{name}: fit: balanced accuracy {_share(fit['balanced_accuracy'])}, false fits {_share(fit['false_fits'])}, "
                f"false refusals {_share(fit['false_oom'])} ({fit['rows']} sets)"
            )
        if memory:
            print(
                f"{name}: memory: median |error| {memory['median_abs']:.1%} ({memory['rows']} sets) "
                + str({k: round(v["median"], 3) for k, v in group["memory_by_source"].items()})
            )
    for each in choices(rows, found):
        regret = "ran out of memory" if each.regret is None else f"{each.regret:6.1%}"
        print(
            f"  group {each.group:18} {each.plans:3d} plans, Spearman {each.spearman:+.2f}, regret {regret}, chose {each.chosen}"
        )


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


if __name__ == "__main__":
    sys.exit(main())
