"""The whole zoo under one plan, as a table: `python -m tests.zoo "dp=2 zero=3" [NAME ...]`.

As a person would do it: where `check` refuses the plan for a model, what it proposes (`whole`) is taken, and said. With tp= each
model's line says how much of its parameters is cut, and the lines below it what is not and why.
"""

from __future__ import annotations

import dataclasses
import sys
import time

from echelon.errors import EchelonError, PlanError
from echelon.plan.certificate import Certificate
from echelon.plan.check import check
from echelon.plan.text import from_text
from echelon.profiler import profile
from echelon.profiler.complete import complete, cuts
from echelon.testing.ranks import Pool, RankError
from tests.zoo import ZOO
from tests.zoo.prove import prove_plan


def main(text: str, names: list[str]) -> int:
    """Prints a line for each entry; 1 if something is not verified."""
    failed = 0
    with Pool() as pool:
        for name in names:
            begin = time.monotonic()
            verdict, plan, remarks, whole = _judge(pool, name, text)
            failed += verdict not in ("verified", "refused")
            line = f"{name:20} {plan:22} {verdict:12} {time.monotonic() - begin:5.1f} s  {' | '.join(remarks)}"
            sys.stdout.write("\n    ".join([line.rstrip(), *whole]) + "\n")
            sys.stdout.flush()
    return int(failed > 0)


def _judge(pool: Pool, name: str, text: str) -> tuple[str, str, list[str], list[str]]:
    """The verdict, the plan it is about, what has to be said beside it, and what is not cut."""
    remarks, whole, job = [], list[str](), ZOO[name]()
    try:
        traced = profile(job)
        problems = [each for each in check(from_text(text), traced) if each.severity == "error"]
        if problems and all("`whole`" in each.remedy for each in problems):
            text += " whole"
            remarks.append("whole, as check asks")
            problems = [each for each in check(from_text(text), traced) if each.severity == "error"]
        if problems:
            return "refused", text, [*remarks, *map(str, problems)], []
    except Exception as error:  # whatever it is belongs into the table
        remarks.append(f"profile failed: {type(error).__name__}: {error}")
    plan = from_text(text)
    try:
        if plan.mesh.tp > 1:
            found = cuts(job, plan.mesh.tp)
            plan = dataclasses.replace(plan, placements=found.placements)  # else `complete` would look again
            remarks.append(f"cut {found.share:.0%}: in pairs {found.paired:.0%}, at rest only {found.stored:.0%}")
            whole = [f"whole: {each}" for each in _by_reason(found.whole)]
            whole += [f"at rest only: {each}" for each in _by_reason(found.resting)]
        document = complete(plan, job).to_json()
        certificate = Certificate.from_json(pool.run(plan.ranks, prove_plan, name, document, timeout=120)[0])
    except RankError as error:
        return "failed", text, [*remarks, str(error).strip()], whole
    except PlanError as error:
        return "refused", text, [*remarks, str(error)], whole
    except EchelonError as error:
        return "failed", text, [*remarks, f"{type(error).__name__}: {error}"], whole
    worst = max(certificate.findings, key=lambda each: each.worst)
    remarks.append(f"worst {worst.worst:.0e} ({worst.kind}), bound {worst.bound:.0e}")
    kept = [each for each in certificate.notes if "all the same" in each or "could not" in each or "ill-cond" in each]
    if not certificate.verified:
        return "NOT VERIFIED", text, [*remarks, certificate.divergent, *kept], whole
    return "verified", text, [*remarks, *kept], whole


def _by_reason(modules: dict[str, str]) -> list[str]:
    found: dict[str, list[str]] = {}
    for path, why in modules.items():
        found.setdefault(why, []).append(path or "(the model itself)")
    return [f"{why}: {', '.join(paths)}" for why, paths in found.items()]


if __name__ == "__main__":
    given = sys.argv[1:] or ["dp=2 zero=3"]
    sys.exit(main(given[0], given[1:] or list(ZOO)))
