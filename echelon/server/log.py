"""The log of a server or controller process: lines of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

#: Logged while kernels are compiled.
COMPILING_EVENT = "compiling"

EventLogger = Callable[[str, Mapping[str, Any]], None]


def log_event(event: str, details: Mapping[str, Any]) -> None:
    """One line of JSON to the standard error."""
    sys.stderr.write(json.dumps({"at": round(time.time(), 3), "event": event, **details}) + "\n")
    sys.stderr.flush()
