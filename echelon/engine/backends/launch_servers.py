"""The servers of a run: started by rank 0 as processes of its machine, which end with it, or such that run already and go on after it.
Every rank has a client of its own."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.engine.process_groups import Ranks
from echelon.errors import EchelonError, ServerError
from echelon.plan.plan import Plan

if TYPE_CHECKING:
    from echelon.server.client.client import Client
    from echelon.server.local_servers import Servers

#: Under which the servers' files lie in a checkpoint.
FOLDER = "server"
#: As many servers as a machine could have, and no more files in a checkpoint than need be.
SHARDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Servers that somebody else started and ends."""

    address: str  #: of their controller
    secret_file: Path


class Keeper:
    """Starts the servers, or finds those that run elsewhere, and joins them. Every rank makes the same calls in the same order."""

    def __init__(self, plan: Plan, ranks: Ranks, elsewhere: Elsewhere | None = None) -> None:
        self._plan, self._ranks, self.elsewhere = plan, ranks, elsewhere
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
        from echelon.server.local_servers import Servers

        plan, ranks = self._plan, self._ranks
        told: tuple[str, bytes] = "", b""
        with ranks.together():
            if self.elsewhere is not None and ranks.world.main:
                from echelon.server.protocol.auth import read_secret

                told = self.elsewhere.address, read_secret(self.elsewhere.secret_file)
            elif ranks.world.main:
                self._servers = Servers(
                    plan.servers,
                    replicas=plan.replicas,
                    shards=SHARDS,
                    staleness=plan.staleness,
                    aggregate=plan.staleness == 0,
                    restore=restore,
                ).watch()
                told = self._servers.address, self._servers.secret
        # The process group is as private as the ranks' own gradients; nothing of it is on a command line or in an environment.
        address, secret = ranks.gather(told)[0]
        with ranks.together():
            self._client = connect(address, secret=secret, worker=str(ranks.rank))
            if self.elsewhere is not None:
                self._require_settings(self.elsewhere)

    def _require_settings(self, elsewhere: Elsewhere) -> None:
        """Whether gradients are added up and who waits for whom is the servers' own, decided when they are started."""
        bound = self._plan.staleness
        mine = {"staleness": bound, "aggregate": bound == 0}
        found = {name: self.client.settings.get(name) for name in mine}
        if found != mine:
            words = (
                f"--staleness {bound}"
                if bound
                else "--staleness 0 --aggregate"
                if bound == 0
                else "without --staleness"
            )
            raise ServerError(
                f"the servers at {elsewhere.address} have staleness={found['staleness']}, aggregate={found['aggregate']}, and the plan has "
                f"staleness={'none' if bound is None else bound}; start them with `echelon serve ... {words}`, or change the plan"
            )

    def known(self) -> dict[str, Any]:
        """What servers elsewhere hold already, by name."""
        return dict(self.client.specs) if self.elsewhere is not None else {}

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
