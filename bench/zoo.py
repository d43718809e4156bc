"""The zoo under every plan at 2 and 4 ranks: verified, falls back to, or refused because.

    python -m bench.zoo [--models gpt-tied,resnet] [--plans "tp=2,dp=2 zero=3"] [--sample 20] [--jobs 1] [--json OUT] [--docs FILE]

As a person would do it: where `check` refuses a plan for a model and proposes `whole`, that is taken; where nothing can be cut, the
plan that takes its place is proved. Each cell is a proof in float64 against one device.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import multiprocessing
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import echelon
from bench.common import Row, among, machine, publish
from echelon.errors import EchelonError, PlanError, UnsplittableModelError
from echelon.partition.complete_plan import complete
from echelon.plan.certificate import Certificate
from echelon.plan.check import check, require_executable
from echelon.plan.describe import cut_fraction
from echelon.plan.fallback import fall_back_to_data_parallel
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.plan.stages import stage_ranges
from echelon.plan.text import from_text
from echelon.profiler import profile
from echelon.testing.rank_pool import RankError, RankPool
from tests.zoo import NAMED, ZOO
from tests.zoo.expected import expected
from tests.zoo.prove import prove_and_count

LIMIT = 1e-9
#: So many of the families that the project set out with (`NAMED`) must really be cut under tp=2, and so many under pp=2.
REAL = 20
ZEROS = ("", " zero=1", " zero=2", " zero=3")
PLANS = (
    *(f"dp=2{zero}" for zero in ZEROS),
    "tp=2",
    "pp=2",
    *(f"dp=4{zero}" for zero in ZEROS),
    "tp=4",
    "pp=4",
    *(f"dp=2 tp=2{zero}" for zero in ZEROS),
    *(f"dp=2 pp=2{zero}" for zero in ZEROS),
    "tp=2 pp=2",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model under one plan."""

    model: str
    plan: str
    #: verified, falls back, refused, not verified, failed
    verdict: str
    why: str = ""
    #: The largest relative difference, and what it may be for this model.
    worst: float = 0.0
    bound: float = LIMIT
    #: Bytes that the busiest rank hands to others in a step, in the job's own precision.
    sent: int = 0
    #: Of the parameters' bytes: cut over tp, of those in pairs or by heads, at rest only; the most that a rank holds of all.
    cut: float = 0.0
    paired: float = 0.0
    stored: float = 0.0
    held: float = 1.0
    #: Of the work of a step: what the busiest rank of the pipeline axis does.
    work: float = 1.0
    seconds: float = 0.0
    #: The machine that judged it, and the code.
    where: str = ""
    code: str = ""

    @property
    def good(self) -> bool:
        """Whether it is as the zoo's own table says, with the torch that judged it."""
        version = re.match(r"torch (\S+)", self.where)
        return self.verdict == expected(self.model, self.plan, *([version[1]] if version else []))

    @property
    def real(self) -> bool:
        """Whether the axes share: more than half of the parameters' bytes are cut, or no stage has three quarters of the work."""
        return self.verdict == "verified" and (self.cut > 0.5 or (self.work < 0.75 and "pp" in self.plan))

    @property
    def busy(self) -> bool:
        """The same without weights that are cut at rest only, which every rank computes with whole."""
        return self.real and ("tp" not in self.plan or self.cut - self.stored > 0.5)


@cache
def _pool() -> RankPool:
    return RankPool()


@cache
def _profile(name: str) -> Profile | None:
    try:
        return profile(ZOO[name]())
    except EchelonError:
        raise
    except Exception:  # a model that cannot be profiled may still train
        return None


@cache
def _completed(name: str, mesh: str) -> Plan:
    """The cuts depend on the mesh alone."""
    return complete(from_text(mesh), ZOO[name](), _profile(name))


def judge(pool: RankPool, name: str, text: str) -> Cell:
    """The cell of a model and a plan."""
    began = time.monotonic()
    try:
        cell = _judged(pool, name, text)
    except RankError as error:
        refused = isinstance(error.error, PlanError)
        why = str(error.error if refused else error).strip()
        cell = Cell(model=name, plan=text, verdict="refused" if refused else "failed", why=why)
    except EchelonError as error:
        cell = Cell(model=name, plan=text, verdict="refused", why=str(error).strip())
    return dataclasses.replace(cell, seconds=time.monotonic() - began, where=_here(), code=_code())


@cache
def _here() -> str:
    found = machine()
    return f"torch {found['torch']} on {found.get('gpu') or found['processor']}"


@cache
def _code() -> str:
    """A hash of echelon's own source, which decides about the verdicts."""
    files = sorted(Path(echelon.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def _judged(pool: RankPool, name: str, text: str) -> Cell:
    wanted, why = from_text(text), ""
    problems = [each for each in check(wanted, _profile(name)) if each.severity == "error"]
    if problems and all("`whole`" in each.remedy for each in problems):
        wanted, why = wanted.replace(shard_as_one=True), "whole, as check asks"
        problems = [each for each in check(wanted, _profile(name)) if each.severity == "error"]
    if any(each.nothing_to_cut for each in problems):
        # Falling back leaves the whole plan, so that what else was wrong with it does not matter.
        return _fallen(pool, name, wanted, text, "; ".join(map(str, problems)))
    if problems:
        return Cell(model=name, plan=text, verdict="refused", why="; ".join(map(str, problems)))
    try:
        if wanted.incomplete:
            found = _completed(name, " ".join(each for each in text.split() if not each.startswith("zero")))
            wanted = wanted.replace(
                placements=found.tensor.placements,
                replicated=found.tensor.replicated,
                stages=found.pipeline.stages,
                model=found.model,
            )
    except UnsplittableModelError as error:
        return _fallen(pool, name, wanted, text, str(error))
    return _proved(pool, name, wanted, text, why)


def _fallen(pool: RankPool, name: str, wanted: Plan, text: str, why: str) -> Cell:
    """What becomes of the plan that takes the place of one that cuts nothing."""
    other, _ = fall_back_to_data_parallel(wanted, _profile(name))
    require_executable(other, _profile(name))
    cell = _proved(pool, name, other, text, f'to "{other}": {why}')
    return dataclasses.replace(cell, verdict="falls back") if cell.verdict == "verified" else cell


def _proved(pool: RankPool, name: str, wanted: Plan, text: str, why: str) -> Cell:
    known = _profile(name)
    told = pool.run(
        wanted.ranks, prove_and_count, name, wanted.to_json(), known.to_json() if known else None, timeout=180
    )
    certificate = Certificate.from_json(told[0].certificate)
    worst = max(certificate.findings, key=lambda each: each.max_difference / each.bound)
    notes = [each for each in certificate.notes if "all the same" in each or "could not" in each or "ill-cond" in each]
    return Cell(
        model=name,
        plan=text,
        verdict="verified" if certificate.verified else "not verified",
        why="; ".join(each for each in (why, "" if certificate.verified else certificate.divergent, *notes) if each),
        worst=worst.max_difference,
        bound=worst.bound,
        sent=max(each.sent for each in told),
        held=max(each.held for each in told),
        **_shares(wanted, known),
    )


def _shares(plan: Plan, known: Profile | None) -> dict[str, float]:
    if known is None:
        return {}
    found = {"work": _work(plan, known)} if plan.mesh.pp > 1 else {}
    if plan.mesh.tp == 1:
        return found

    paired = cut_fraction(plan, known, "column", "between", "row", "attention")
    return found | {"cut": cut_fraction(plan, known), "paired": paired, "stored": cut_fraction(plan, known, "stored")}


def _work(plan: Plan, known: Profile) -> float:
    """Of the busiest rank of the pipeline axis."""
    work = [0.0] * plan.mesh.pp
    for stage, visits in enumerate(stage_ranges(plan, len(known.pipeline_units))):
        work[stage % plan.mesh.pp] += sum(known.pipeline_units[place].cost for place in visits)
    return max(work) / sum(work)


def _model(name: str, plans: Sequence[str]) -> list[Cell]:
    return [judge(_pool(), name, text) for text in plans]


def cells(wanted: Sequence[tuple[str, str]], jobs: int) -> Iterator[Cell]:
    """Every cell, as it comes; the plans of one model after each other, as they share what is found of it."""
    by_model: dict[str, list[str]] = {}
    for name, text in wanted:
        by_model.setdefault(name, []).append(text)
    if jobs == 1:
        for name, plans in by_model.items():
            yield from (judge(_pool(), name, text) for text in plans)
            _profile.cache_clear()
            _completed.cache_clear()
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as workers:
        for done in as_completed([workers.submit(_model, name, plans) for name, plans in by_model.items()]):
            yield from done.result()


# The table for the docs

SIGNS = {"verified": "✓", "falls back": "→", "refused": "–", "not verified": "✗", "failed": "✗"}


def page(found: Sequence[Cell]) -> str:
    """The docs' page."""
    by_model: dict[str, dict[str, Cell]] = {}
    for cell in found:
        by_model.setdefault(cell.model, {})[cell.plan] = cell
    plans = [text for text in PLANS if any(text in row for row in by_model.values())]
    verified = sum(cell.verdict == "verified" for cell in found)
    sources = Counter((cell.where, cell.code) for cell in found).most_common()
    lines = [
        f"# The zoo: {len(by_model)} models under {len(plans)} plans",
        "",
        f"Which of {len(by_model)} small, unmodified models train correctly under each plan, and what happens to the others. Read this page to",
        "see what tp, pp and ZeRO do to a model like yours.",
        "",
        "```",
        'python -m bench.zoo --models resnet --plans "tp=2"    # prove some cells',
        "python -m bench.zoo --docs docs/zoo.md                # prove all cells and write this page",
        "```",
        "",
        f"{len(by_model)} models, {len(plans)} plans at 2 and 4 ranks, {len(found)} cells. {verified} cells are proved in float64 against one device.",
        "",
        *(f"- {count} cells: {where}, code {code}" for (where, code), count in sources),
        "",
        '"Code" is the start of a hash of the echelon source that was tested.',
        "",
        "| sign | meaning |",
        "|---|---|",
        "| ✓ | verified: within 1e-9 of one device |",
        "| ≈ | verified within a wider bound, which the rounding of the model itself requires |",
        "| → | the axis finds nothing to cut; the plan falls back to data parallelism, sharded if possible, which is proved |",
        "| – | `check` refuses the plan and names a remedy; `echelon train` may [run another plan](fallback.md) |",
        "| ✗ | not as expected |",
        "",
        "| model | " + " | ".join(plan.replace(" zero=", " z") for plan in plans) + " |",
        "|---|" + "---|" * len(plans),
    ]
    for name, row in by_model.items():
        lines.append(f"| {name} | " + " | ".join(_sign(row.get(plan)) for plan in plans) + " |")
    lines += ["", "## What is cut, and what the ranks send", "", *_shares_table(by_model), "", "## Reasons", ""]
    lines += [
        "For each cell that is not plainly verified, what `check` or the proof reported. `n` stands for any number.",
        "",
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    for cell in found:
        if cell.why:
            why = re.sub(r"\b(dp|tp|pp|zero)=\d+", r"\1=n", f"{cell.verdict}: {cell.why}")
            reasons.setdefault((cell.model, why), []).append(cell.plan)
    lines += [f"- **{name}**, {', '.join(plans)}: {' '.join(why.split())}" for (name, why), plans in reasons.items()]
    return "\n".join(lines) + "\n"


def _sign(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return "≈" if cell.verdict == "verified" and cell.worst > LIMIT else SIGNS[cell.verdict]


def _shares_table(by_model: Mapping[str, Mapping[str, Cell]]) -> Iterator[str]:
    yield from (
        "Percentages of the parameters' bytes, and bytes that the busiest rank sends in a step.",
        "",
        "- **cut**: cut over tp. **in pairs or by heads**: cut so that the ranks communicate once per pair. **at rest only**:",
        "  divided in memory, computed whole (`stored`).",
        "- **held**: on the rank that holds the most.",
        "- **work**: of a step, on the busiest pipeline rank. Stages are balanced by it.",
        "",
    )
    yield "| model | tp=2: cut | in pairs or by heads | at rest only | held | sent | pp=2: work | held | sent | dp=2: sent | zero=3: sent |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for name, row in by_model.items():
        proved = {plan: cell for plan, cell in row.items() if cell.verdict == "verified"}
        cells = [proved.get(plan) for plan in ("tp=2", "pp=2", "dp=2", "dp=2 zero=3")]
        tensor, stages, *_ = cells
        sent = [f"{cell.sent / 1e3:,.0f} kB" if cell else "" for cell in cells]
        shares = (
            [f"{share:.0%}" for share in (tensor.cut, tensor.paired, tensor.stored, tensor.held)]
            if tensor
            else [""] * 4
        )
        staged = [f"{share:.0%}" for share in (stages.work, stages.held)] if stages else [""] * 2
        told = [*shares, sent[0], *staged, *sent[1:]]
        yield f"| {name} | {' | '.join(told)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 when every cell is as it should be."""
    parser = argparse.ArgumentParser(prog="python -m bench.zoo", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", type=among(*ZOO), default=[], help="separated by commas (default: all that can be made here)"
    )
    parser.add_argument("--plans", default="")
    parser.add_argument("--sample", type=int, help="so many cells, drawn with a seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="models at once; each takes up to 4 processes")
    parser.add_argument(
        "--json", type=Path, help="where cells are kept as they come; those that are there are not made again"
    )
    parser.add_argument("--docs", type=Path, help="write the table there")
    given = parser.parse_args(arguments)
    names = given.models or _here_to_make()
    plans = [each.strip() for each in given.plans.split(",") if each.strip()] or list(PLANS)
    wanted = [(name, text) for name in names for text in plans]
    if given.sample is not None:
        wanted = sorted(random.Random(given.seed).sample(wanted, min(given.sample, len(wanted))))
    known = _kept(given.json)
    for cell in cells([each for each in wanted if each not in known], given.jobs):
        known[cell.model, cell.plan] = cell
        line = (
            f"{cell.model:20} {cell.plan:16} {cell.verdict:12} {cell.worst:.0e} {cell.seconds:5.1f} s  {cell.why[:200]}"
        )
        print(line.rstrip(), file=sys.stderr, flush=True)
        if given.json is not None:
            kept = {"machine": machine(), "cells": [asdict(each) for each in known.values()]}
            given.json.write_text(json.dumps(kept, indent=0))
    found = [known[each] for each in wanted]
    if given.docs is not None:
        given.docs.write_text(page(found))
    return publish("The zoo", list(_rows(found)))


def _kept(path: Path | None) -> dict[tuple[str, str], Cell]:
    if path is None or not path.exists():
        return {}
    return {(each["model"], each["plan"]): Cell(**each) for each in json.loads(path.read_text())["cells"]}


def _here_to_make() -> list[str]:
    """The models whose packages are installed."""
    return [name for name, entry in ZOO.items() if all(importlib.util.find_spec(each) for each in entry.needs)]


def _rows(found: Sequence[Cell]) -> Iterator[Row]:
    for text in dict.fromkeys(cell.plan for cell in found):
        mine = [cell for cell in found if cell.plan == text]
        proved = [cell for cell in mine if cell.verdict == "verified"]
        bad = [cell for cell in mine if not cell.good]
        what = {
            "plan": text,
            "verified": f"{len(proved)} of {len(mine)}",
            "more than half cut or staged": _real(mine) if "tp" in text or "pp" in text else "",
            "falls back, refused": ", ".join(c.model for c in mine if c.good and c not in proved),
            "beyond 1e-9": ", ".join(f"{c.model} {c.worst:.0e}" for c in proved if c.worst > LIMIT),
        }
        yield Row(what=what, value=len(bad), text=", ".join(c.model for c in bad) or "none", limit=0)
        if text in ("tp=2", "pp=2") and {cell.model for cell in mine} >= set(NAMED) & set(_here_to_make()):
            named = [cell for cell in mine if cell.model in NAMED]
            real = sum(cell.real for cell in named)
            what |= dict.fromkeys(("verified", "falls back, refused", "beyond 1e-9"), "")
            yield Row(what=what, value=real, text=f"{real} of {len(named)} named families are really cut", least=REAL)


def _real(cells: Sequence[Cell]) -> str:
    real = [cell for cell in cells if cell.real]
    if not any("tp" in cell.plan for cell in cells) or not real:
        return str(len(real))
    cut = [cell for cell in real if cell.cut]
    paired = sum(cell.paired / cell.cut for cell in cut) / max(len(cut), 1)
    return f"{len(real)}, {sum(cell.busy for cell in real)} of them without what is cut at rest only; {paired:.0%} of it in pairs"


if __name__ == "__main__":
    sys.exit(main())
