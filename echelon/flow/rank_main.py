"""One rank of a verb that the command line started: `python -m echelon.flow.rank_main VERB FILE[:name] OPTIONS-AS-JSON [--debug]`."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
from typing import Any

from echelon.launchers.local import INTERRUPTED_EXIT_CODE
from echelon.launchers.rank_ipc import format_error, report_failure, take_result_path
from echelon.world import World, read_world


def main(verb: str, spec: str, options: str, debug: str = "") -> int:
    """Execute the verb on this rank; the launcher receives the result, or an error as one message."""
    world, result_path = read_world(), take_result_path()
    try:
        result = _execute(verb, spec, json.loads(options), world)
        if world.is_main and result_path is not None:
            result_path.write_text(result.to_json(), encoding="utf-8")
        return INTERRUPTED_EXIT_CODE if getattr(result, "interrupted", False) else 0
    except KeyboardInterrupt:
        # Ended by the signal, not by an exit code: it tells the launcher that nothing was saved.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return INTERRUPTED_EXIT_CODE
    except Exception as error:
        if not report_failure(error, world.rank, with_traceback=bool(debug)):
            print(f"error: {format_error(error, with_traceback=bool(debug))}", file=sys.stderr)  # noqa: T201
        return getattr(error, "exit_code", 1)


def _execute(verb: str, spec: str, options: dict[str, Any], world: World) -> Any:
    from echelon.flow.job_source import JobSource

    if verb == "verify":
        from echelon.flow.verify import verify_job

        return verify_job(JobSource(spec), None, world, **options)
    from echelon.flow.settings import Settings
    from echelon.flow.train import train_job

    return train_job(JobSource(spec), None, Settings(**options), world)


def _exit_now(codes: list[int]) -> None:
    """The last exit handler. It skips Python's finalization, in which threads of process groups that torch still caches
    abort the process after everything is done and saved."""
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


if __name__ == "__main__":
    codes: list[int] = []
    atexit.register(_exit_now, codes)  # first in, last out: after the exit handlers of other libraries
    codes.append(main(*sys.argv[1:5]))
    sys.exit(codes[0])
