"""Every fault of the catalogue on three models and more: caught or not, what is said first, and where.

    python -m bench.faults [--sample 12] [--only "clip by local norm"] [--json faults.json]

Each is put into a live run under a plan where it shows. The same models and plans without a fault are proved too: an alarm there would
be false.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.common import Row, publish, tell
from echelon.testing.fault_catalogue import FAULTS
from echelon.testing.rank_pool import RankError, RankPool
from tests.verifier.fault_table import CAUGHT, QUIET, Caught, certify

NONE = "no fault"


def main(arguments: Sequence[str] | None = None) -> int:
    """Inject each; 0 when all are caught and named, and nothing else is."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description="the catalogue of faults, injected")
    parser.add_argument(
        "--sample", type=int, help="so many faults, and a third as many proofs without one, chosen by a seed"
    )
    parser.add_argument("--only", help=f'one fault by its name, or "{NONE}"')
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args(arguments)
    faulty = [(case, model) for case in CAUGHT for model in case.models if asked.only in (None, case.fault)]
    quiet = [(Caught("", plan, (model,), ()), model) for model, plan in QUIET if asked.only in (None, NONE)]
    if not faulty and not quiet:
        print(f"{asked.only}: no such fault; the catalogue has {', '.join(FAULTS)}", file=sys.stderr)
        return 2
    if asked.sample is not None:
        draw = random.Random(0)
        faulty = draw.sample(faulty, min(asked.sample, len(faulty)))
        quiet = draw.sample(quiet, min(asked.sample // 3, len(quiet)))
    with RankPool() as pool:
        rows = [tell(_row(pool, case, model)) for case, model in (*faulty, *quiet)]
    notes = [
        "first: the first divergent tensor by step, kind and forward order, or the first module whose output is off"
    ]
    return publish("Faults", rows, json_path=asked.json, notes=notes)


def _row(pool: RankPool, case: Caught, model: str) -> Row:
    what = {"fault": case.fault or NONE, "plan": case.plan, "model": model}
    try:
        certificate = certify(pool, model, case.plan, case.fault)
    except RankError as error:
        return Row(what=what | {"first": "", "named": str(error).splitlines()[-1]}, value=1, text="ended", limit=0)
    parts = certificate.divergent.split("; ")
    outputs = [each for each in certificate.findings if each.kind == "output" and not each.is_within_bound]
    first = f"output of {outputs[0].where}" if outputs else parts[0].partition(": ")[0]
    caught = not certificate.verified
    named = all(words in certificate.divergent for words in case.words)
    good = caught and named if case.fault else not caught
    text = ("caught" if named else "caught, not named") if caught else "verified"
    said = "; ".join(part for part in parts if any(words in part for words in case.words)) or certificate.divergent
    return Row(what=what | {"first": first, "named": said}, value=0 if good else 1, text=text, limit=0)


if __name__ == "__main__":
    raise SystemExit(main())
