"""A process of the parameter server: a server or the controller.

    python -m echelon.server.process_main        reads its configuration and the secret from standard input, as one line of JSON

It ends when its input ends, so it never outlives the process that started it. `echelon server start` runs the same classes in the foreground.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError
from echelon.server.controller_process import ControllerProcess
from echelon.server.log import log_event
from echelon.server.protocol.auth import parse_secret
from echelon.server.server_process import ServerProcess


def create_process(role: str, secret: bytes, config: Mapping[str, Any]) -> ControllerProcess | ServerProcess:
    """A server or controller from plain values."""
    paths = {name: Path(config[name]) for name in ("folder", "spill", "restore") if config.get(name) is not None}
    process_class = ControllerProcess if role == "controller" else ServerProcess
    return process_class(secret=secret, **{**config, **paths})


def main() -> int:
    """Run the process that the first line of standard input describes."""
    config = json.loads(sys.stdin.readline())
    # Ctrl-C is for the process that started this one; our input ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    secret, role = parse_secret(config.pop("secret")), config.pop("role")
    try:
        process = create_process(role, secret, config)
        sys.stdout.write(json.dumps({"address": process.address}) + "\n")
        sys.stdout.flush()

        def stop_at_end_of_input() -> None:
            if not os.read(0, 4096):
                process.loop.running = False

        process.loop.watch(0, stop_at_end_of_input)
        process.run()
    except EchelonError as error:
        log_event("failed", {"why": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
