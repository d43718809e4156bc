"""One rank of a verb that the command line started: `python -m echelon.flow.rank VERB FILE[:name] OPTIONS-AS-JSON`."""

from __future__ import annotations

import json
import sys

from echelon.errors import EchelonError
from echelon.launchers.handover import leave_word
from echelon.world import read_world


def main(verb: str, spec: str, options: str) -> int:
    """Execute the verb on this rank; an error reaches the launcher as one message."""
    world = read_world()
    try:
        if verb == "verify":
            from echelon.flow.verify import verify_file

            verify_file(spec, **json.loads(options))
        else:
            from echelon.flow.train import train

            train(spec, **json.loads(options))
        return 0
    except EchelonError as error:
        if not leave_word(error, world.rank):
            print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
