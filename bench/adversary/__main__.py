"""`python -m bench.adversary`: run the catalogue, print a table, exit 1 if anything was silent, hung, crashed or refused without cause."""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import queue
import random
import re
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.adversary.candidate import ROOT, Command, Outcome, Reused, rewind
from bench.adversary.spec import Entry, catalogue
from bench.adversary.verdict import BAD, GOOD, Cell, Judge, decide, words_of

PLANS = (
    "dp=2",
    "dp=2 micro=2",
    "dp=2 zero=1",
    "dp=2 zero=2",
    "dp=2 zero=3",
    "tp=2",
    "pp=2 micro=2",
    "pp=4",
    "dp=2 shares=3:1",
    "auto",
    "dp=1 micro=3",
    "dp=2 recompute=block",
    "dp=2 tp=2",
    "dp=2 pp=2 micro=2",
    "dp=4 zero=3",
    "dp=2 > dp=1",
    "dp=2 zero=3 > tp=2",
)
#: Of explicit plans, the share that may be refused or stopped.
REFUSED = 0.05
_PLAIN = str.maketrans(" =:>", "____")
#: Resumed cells go on from this step of ten.
_RESUME_AT = 6
#: transformers imports its models when they are asked for, which fails in a second thread.
_MAKING = threading.Lock()


class Harness:
    """Trains cells, several at once, and keeps each result as it comes."""

    def __init__(self, work: Path, kind: Callable[..., Command | Reused], *, parallel: int, timeout: float) -> None:
        self._work, self._judge = work, Judge(work)
        self._trainers: queue.SimpleQueue[Command | Reused] = queue.SimpleQueue()
        self._all = [kind(work, timeout=timeout) for _ in range(parallel)]
        for each in self._all:
            self._trainers.put(each)

    def cell(self, entry: Entry, plan: str) -> Cell:
        """The verdict about one job under one plan."""
        trainer = self._trainers.get()
        try:
            folder = self._work / "runs" / f"{entry.name} {plan}".translate(_PLAIN)
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier catalogue that kept its work
            with _MAKING:
                spec = entry.make()
            outcome = _train(trainer, entry.name, plan, folder, spec.every)
            verdict, why, worst, ran = decide(entry, spec, plan, outcome, self._judge)
        except Exception as error:  # the harness or the judge: a fault of the catalogue, shown as such
            return Cell(job=entry.name, plan=plan, verdict="CRASH", why=f"catalogue: {error!r}"[:600], code=code(entry))
        finally:
            self._trainers.put(trainer)
        return Cell(
            job=entry.name,
            plan=plan,
            verdict=verdict,
            why=why,
            worst=min(worst, 1e308),
            ran=ran,
            seconds=round(outcome.seconds, 1),
            how=trainer.name,
            code=code(entry),
        )

    def close(self) -> None:
        """End every process."""
        for each in self._all:
            each.close()
        self._judge.close()


def _train(trainer: Command | Reused, job: str, plan: str, folder: Path, every: int | None) -> Outcome:
    """Train; for "A > B" train under A, lose everything after a checkpoint in the middle, and go on under B."""
    first, arrow, second = plan.partition(" > ")
    if not arrow:
        return trainer.train(job, plan, folder, every=every)
    outcome = trainer.train(job, first, folder, every=3)
    if outcome.code != 0:
        return outcome
    if not rewind(folder, _RESUME_AT):
        return Outcome(code=1, output="no checkpoint to resume from", folder=folder, seconds=0, raised="no checkpoint")
    return trainer.train(job, second, folder, every=3)


@cache
def _echelon() -> str:
    files = sorted((ROOT / "echelon").rglob("*.py"))
    return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()[:8]


def code(entry: Entry) -> str:
    """Hashes of echelon's source and of the file that holds the job: what a verdict depends on."""
    file = Path(__file__).parent / "jobs" / f"{entry.name.partition('.')[0]}.py"
    return f"{_echelon()}-{hashlib.sha256(file.read_bytes()).hexdigest()[:8]}"


def chosen(given: argparse.Namespace) -> list[tuple[Entry, str]]:
    """The cells that the command line asks for, in a fixed order."""
    plans = [each.strip() for each in given.plans.split(",") if each.strip()] or list(PLANS)
    cells = [
        (entry, plan)
        for entry in catalogue().values()
        if entry.available and any(fnmatch.fnmatch(entry.name, glob) for glob in given.only.split(","))
        for plan in plans
        if not entry.plans or any(fnmatch.fnmatch(plan, glob) for glob in entry.plans)
    ]
    part, parts = (int(each) for each in given.part.split("/"))
    mine = {job for place, job in enumerate(dict.fromkeys(entry.name for entry, _ in cells)) if place % parts == part}
    cells = [each for each in cells if each[0].name in mine]
    if given.sample is not None:
        cells = random.Random(given.seed).sample(
            cells, min(given.sample, len(cells))
        )  # in any order: a part is a sample too
    return cells


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 when no cell is bad and few explicit plans were refused."""
    parser = argparse.ArgumentParser(prog="python -m bench.adversary", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="names of jobs, with wildcards, separated by commas: losses.*")
    parser.add_argument("--plans", default="", help="plans instead of all of them, separated by commas")
    parser.add_argument("--sample", type=int, help="draw this many cells")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--part", default="0/1", help="every N-th job, from the I-th: I/N, for several machines or processes"
    )
    parser.add_argument("--parallel", type=int, default=1, help="cells at once; each takes up to 4 processes")
    parser.add_argument("--fast", action="store_true", help="in reused ranks instead of the command line")
    parser.add_argument("--json", type=Path, help="keep cells here; those that are there for the same code are skipped")
    parser.add_argument("--bad", action="store_true", help="only the cells that --json holds as bad, again")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds until a training counts as hung")
    parser.add_argument("--work", type=Path, help="keep run folders and logs here")
    parser.add_argument("--list", action="store_true", help="print the jobs and end")
    given = parser.parse_args(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # up to four ranks in float64 each, and a judge without devices
    if not re.fullmatch(r"\d+/[1-9]\d*", given.part) or int(given.part.split("/")[0]) >= int(given.part.split("/")[1]):
        parser.error("--part: I/N with I from 0 to N - 1, as 0/4")
    cells = chosen(given)
    if given.list:
        for entry in {entry.name: entry for entry, _ in cells}.values():
            print(f"{entry.name:42} {entry.owner:9} {entry.attacks}")
        return 0
    known = _read(given.json)
    if given.bad:
        cells = [each for each in cells if _key(*each) in known and known[_key(*each)].bad]
    stale = [each for each in cells if _key(*each) not in known or known[_key(*each)].code != code(each[0])]
    todo = cells if given.bad else stale
    with tempfile.TemporaryDirectory(prefix="adversary-") as scratch:
        work = given.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        harness = Harness(work, Reused if given.fast else Command, parallel=given.parallel, timeout=given.timeout)
        try:
            for cell in _cells(harness, todo, given.parallel):
                known[cell.job, cell.plan] = cell
                _show(cell)
                if given.json is not None:
                    given.json.write_text(json.dumps([asdict(each) for each in known.values()], indent=0))
        finally:
            harness.close()
    return summary([known[_key(*each)] for each in cells])


def _cells(harness: Harness, todo: Sequence[tuple[Entry, str]], parallel: int) -> Iterator[Cell]:
    with ThreadPoolExecutor(parallel) as workers:
        futures = [workers.submit(harness.cell, entry, plan) for entry, plan in todo]
        for done in as_completed(futures):
            yield done.result()


def _key(entry: Entry, plan: str) -> tuple[str, str]:
    return entry.name, plan


def _read(path: Path | None) -> dict[tuple[str, str], Cell]:
    if path is None or not path.exists():
        return {}
    return {(each["job"], each["plan"]): Cell(**each) for each in json.loads(path.read_text())}


def _show(cell: Cell) -> None:
    why = f"  {' '.join(cell.why.split())[:220]}" if cell.why else ""
    line = f"{cell.job:40} {cell.plan:20} {cell.verdict:11} {cell.worst:.0e} {cell.seconds:5.1f} s{why}"
    print(line.rstrip(), file=sys.stderr, flush=True)


def summary(cells: Sequence[Cell]) -> int:
    """Print counts by plan and the failures by owner; the exit code."""
    verdicts = (*GOOD, *BAD)
    table = Table(title=f"{len({each.job for each in cells})} jobs, {len(cells)} cells", title_justify="left")
    for heading in ("plan", *verdicts):
        table.add_column(heading)
    for plan in [*dict.fromkeys(each.plan for each in cells), "all"]:
        counts = Counter(each.verdict for each in cells if plan in (each.plan, "all"))
        table.add_row(plan, *(str(counts[each] or "") for each in verdicts))
    console = Console(width=140)
    console.print(table)
    entries = catalogue()
    for owner in sorted({entries[each.job].owner for each in cells if each.bad}):
        console.print(f"[bold]{owner}[/]")
        for cell in cells:
            if cell.bad and entries[cell.job].owner == owner:
                why = " ".join(cell.why.split())[:300]
                console.print(f"  {cell.verdict}: {cell.job}, {cell.plan}: {why}", markup=False, highlight=False)
    explicit = [each for each in cells if each.plan != "auto"]
    refused = [each for each in explicit if each.verdict in ("refused", "stopped")]
    ours = [each for each in refused if not words_of(each.plan) & entries[each.job].refusable]
    share = len(refused) / len(explicit) if explicit else 0.0
    bad = sum(each.bad for each in cells)
    print(
        f"{bad} bad; {len(refused)} of {len(explicit)} explicit plans refused or stopped ({share:.1%}, at most {REFUSED:.0%}), "
        f"{len(ours)} of them although the plan could train the job; "
        f"{sum(each.plan == 'auto' and each.verdict == 'FALSE ALARM' for each in cells)} refused under auto"
    )
    return 1 if bad or share > REFUSED else 0


if __name__ == "__main__":
    sys.exit(main())
