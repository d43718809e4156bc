"""Who executes: this process, or ranks that it starts.

`python file.py` and `parallelize` start ranks by running the same command again in each; the command line runs
`echelon.flow.rank`. Either way nothing is pickled: each rank makes the job from its own source.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from echelon.errors import EchelonError, JobError, WorldError
from echelon.flow.prepare import Prepared, main_script
from echelon.launchers import handover
from echelon.launchers.local import launch
from echelon.plan.plan import Plan
from echelon.world import World


def require_world(plan: Plan, world: World) -> None:
    """The ranks that a launcher started are those that the plan needs."""
    if world.size != plan.ranks:
        raise WorldError(
            f'the plan "{plan}" is for {plan.ranks} rank{"s" * (plan.ranks > 1)} and {world.size} were started; start {plan.ranks}, or give '
            f"a plan for {world.size} (dp={world.size})"
        )


def run_script_again(prepared: Prepared) -> NoReturn:
    """Run this very command once per rank, then end this process: the ranks have executed the rest of the script too."""
    plan = prepared.plan
    if main_script() is None or hasattr(sys, "ps1"):
        raise JobError(
            f'the plan "{plan}" needs {plan.ranks} processes, which are started by running your script again, and this is not a script: '
            'write the job to file.py and say `echelon train file.py`, or use plan="dp=1"'
        )
    try:
        code = _launch([sys.executable, *sys.orig_argv[1:]], prepared)
    except EchelonError as error:
        # A script has no command line of ours around it to turn the error into words.
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        code = error.exit_code
    raise SystemExit(code)


def run_ranks(verb: str, spec: str, prepared: Prepared, options: Mapping[str, Any], *, debug: bool = False) -> int:
    """Run a verb of the command line once per rank; returns the exit code."""
    command = [sys.executable, "-m", "echelon.flow.rank", verb, spec, json.dumps(dict(options))]
    return _launch([*command, "--debug"] if debug else command, prepared)


def _launch(command: list[str], prepared: Prepared) -> int:
    plan = prepared.plan
    with tempfile.TemporaryDirectory(prefix="echelon-plan-") as folder:
        path = prepared.hand_over(Path(folder))
        return launch(command, plan.ranks, threads=plan.threads, environment={handover.PLAN: str(path)})


def tell_launcher(world: World) -> None:
    """From now on an error that ends this rank reaches the launcher as one message, with its traceback if it is not ours."""
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not handover.leave_word(error, world.rank, trace=not isinstance(error, EchelonError)):
            usual(kind, error, trace)

    sys.excepthook = hook
