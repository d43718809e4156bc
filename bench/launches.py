"""`python -m bench.launches`: is a result the same at every launch? Jobs that follow hashes, random numbers and orders, 20 times each.

Each launch is `echelon train` in a process of its own, with its ranks, a hash seed of its own in the shell and a run folder of its own.
Losses and exported weights are compared bit by bit. Exit code 1 where two launches differ or one fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import load_file

from bench.adversary.candidate import Command
from echelon.engine.weights import export_weights

#: (job of bench.adversary, plan): what decides its order or its draws is not the same in two processes unless somebody makes it so.
CASES = (
    ("control.hash_order", "dp=2"),
    ("environment.parameters_in_hash_order", "dp=2 zero=1"),
    ("environment.scale_by_hash", "dp=2"),
    ("control.layer_drop_python", "dp=2"),
    ("control.own_generator", "dp=2"),
    ("control.dropout", "dp=2"),
    ("control.dropout", "tp=2"),
    ("data.drawn_by_torch", "dp=2"),
    ("data.drawn_by_numpy", "dp=2"),
    ("data.drawn_late", "dp=2"),
    ("data.drawing_collate", "dp=2"),
    ("optimizers.langevin", "dp=2"),
    ("optimizers.python_noise", "dp=2"),
    ("optimizers.own_generator", "dp=2"),
)
LAUNCHES = 20


def launch(work: Path, job: str, plan: str, number: int) -> str:
    """A digest of what one launch trained; an error's last line where it failed."""
    folder = work / "runs" / f"{job}-{plan.replace(' ', '-')}-{number}"
    outcome = Command(work, timeout=300, environment={"PYTHONHASHSEED": "random"}).train(job, plan, folder)
    if outcome.code != 0:
        return f"failed: {outcome.output.strip().splitlines()[-1][:200]}"
    weights = folder.parent / f"{folder.name}.safetensors"
    export_weights(folder, weights)
    digest = hashlib.sha256(repr(outcome.losses).encode())
    for name, value in sorted(load_file(weights).items()):  # not the file's bytes: its header has no fixed order
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    shutil.rmtree(folder)
    weights.unlink()
    return digest.hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 when all launches of each case trained the same bits."""
    parser = argparse.ArgumentParser(prog="python -m bench.launches", description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=LAUNCHES)
    parser.add_argument("--only", default="", help="jobs whose name contains this")
    parser.add_argument("--parallel", type=int, default=2, help="launches at once")
    parser.add_argument("--json", type=Path, help="write the results here")
    given = parser.parse_args(arguments)
    cases = [each for each in CASES if given.only in each[0]]
    found: list[dict[str, object]] = []
    differs = False
    table = Table(title=f"{given.launches} fresh launches", title_justify="left")
    for heading in ("job", "plan", "different results", ""):
        table.add_column(heading)
    with (
        tempfile.TemporaryDirectory(prefix="launches-") as scratch,
        Progress(console=Console(stderr=True)) as progress,
        ThreadPoolExecutor(given.parallel) as workers,
    ):
        bar = progress.add_task("launches", total=len(cases) * given.launches)
        for job, plan in cases:
            futures = [workers.submit(launch, Path(scratch), job, plan, each) for each in range(given.launches)]
            results: Counter[str] = Counter()
            for future in futures:
                results[future.result()] += 1
                progress.advance(bar)
            failed = next((each for each in results if each.startswith("failed")), "")
            differs |= bool(failed) or len(results) > 1
            found.append({"job": job, "plan": plan, "results": dict(results)})
            table.add_row(job, plan, str(len(results)), failed)
            if given.json is not None:
                kept = {"launches": given.launches, "cores": os.cpu_count(), "cases": found}
                given.json.write_text(json.dumps(kept, indent=1))
    Console(width=120).print(table)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
