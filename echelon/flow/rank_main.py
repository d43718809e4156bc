"""One rank of a verb that the command line started: `python -m echelon.flow.rank_main VERB FILE[:name] OPTIONS-AS-JSON [--debug]`."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys

from echelon.launchers.local import INTERRUPTED_EXIT_CODE
from echelon.launchers.rank_ipc import format_error, report_failure
from echelon.world import read_world


def main(verb: str, spec: str, options: str, debug: str = "") -> int:
    """Execute the verb on this rank; an error, ours or the user's, reaches the launcher as one message."""
    world = read_world()
    try:
        if verb == "verify":
            from echelon.flow.verify import verify_file

            verify_file(spec, **json.loads(options))
        else:
            from echelon.flow.train import train

            train(spec, **json.loads(options))
        return 0
    except KeyboardInterrupt:
        # Ended by the signal and not by an exit code: the launcher then knows that nothing was saved.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return INTERRUPTED_EXIT_CODE
    except Exception as error:
        if not report_failure(error, world.rank, with_traceback=bool(debug)):
            print(f"error: {format_error(error, with_traceback=bool(debug))}", file=sys.stderr)  # noqa: T201
        return getattr(error, "exit_code", 1)


def _exit_now(codes: list[int]) -> None:
    """The last that runs before Python takes itself apart, which it must not: where torch's caches still hold a process group its
    threads abort the process then, after all is done and saved."""
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


if __name__ == "__main__":
    codes: list[int] = []
    atexit.register(_exit_now, codes)  # first in, last out: other libraries' farewells come before it
    codes.append(main(*sys.argv[1:5]))
    sys.exit(codes[0])
