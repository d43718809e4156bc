"""The servers of a run: started by rank 0 as processes of its machine, which end with it; every rank has a client of its own."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.engine.ranks import Ranks
from echelon.errors import EchelonError
from echelon.plan.plan import Plan

if TYPE_CHECKING:
    from echelon.server.client import Client
    from echelon.server.embedded import Servers

#: Under which the servers' files lie in a checkpoint.
FOLDER = "server"
#: As many servers as a machine could have, and no more files in a checkpoint than need be.
SHARDS = 64


class Keeper:
    """Starts the servers and joins them. Every rank makes the same calls in the same order."""

    def __init__(self, plan: Plan, ranks: Ranks) -> None:
        self._plan, self._ranks = plan, ranks
        self._servers: Servers | None = None
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        """This rank's connection."""
        assert self._client is not None, "open() comes first"
        return self._client

    def open(self, restore: Path | None = None) -> None:
        """Start servers, with what others wrote to `restore`, and connect."""
        from echelon.server import connect
        from echelon.server.embedded import Servers

        plan, ranks = self._plan, self._ranks
        told: tuple[str, bytes] = "", b""
        with ranks.together():
            if ranks.world.main:
                self._servers = Servers(
                    plan.servers,
                    replicas=plan.replicas,
                    shards=SHARDS,
                    staleness=plan.staleness,
                    aggregate=plan.staleness == 0,
                    restore=restore,
                )
                told = self._servers.address, self._servers.secret
        # The process group is as private as the ranks' own gradients; nothing of it is on a command line or in an environment.
        address, secret = ranks.gather(told)[0]
        with ranks.together():
            self._client = connect(address, secret=secret, worker=str(ranks.rank))

    def save(self, folder: Path) -> None:
        """Have the servers write what they hold."""
        self.client.checkpoint(str(folder.absolute()))

    def close(self) -> None:
        """Leave, and end the servers once all have left."""
        if self._client is not None:
            with contextlib.suppress(EchelonError, OSError):  # rank 0 may have ended them already
                self._client.close()
            self._client = None
        if self._servers is not None:
            self._servers.close()
            self._servers = None
