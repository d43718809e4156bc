"""One process of the parameter server: a server or the controller.

    python -m echelon.server.process_main        reads one line of JSON from its standard input: what it is, and the secret

It ends when that input ends, so it never outlives whoever started it; `echelon server start` runs the same classes by hand.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from echelon.errors import EchelonError
from echelon.server.controller_process import ControllerProcess
from echelon.server.log import log_event
from echelon.server.protocol.auth import parse_secret
from echelon.server.server_process import ServerProcess


def main() -> int:
    """One process, as a line of JSON on the standard input says."""
    config = json.loads(sys.stdin.readline())
    # Ctrl-C is for whoever started us; our input ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    secret = parse_secret(config.pop("secret"))
    role = config.pop("role")
    process: ControllerProcess | ServerProcess
    for name in ("folder", "spill", "restore"):
        if config.get(name) is not None:
            config[name] = Path(config[name])
    try:
        process = (
            ControllerProcess(secret=secret, **config)
            if role == "controller"
            else ServerProcess(secret=secret, **config)
        )
        sys.stdout.write(json.dumps({"address": process.address}) + "\n")
        sys.stdout.flush()
        loop = process.loop

        def stop_at_end_of_input() -> None:
            if not os.read(0, 4096):
                loop.running = False

        loop.watch(0, stop_at_end_of_input)
        process.run()
    except EchelonError as error:
        log_event("failed", {"why": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
