"""Start the servers of a run on rank 0's machine, or connect to external ones. Every rank has a client of its own."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.engine.process_groups import WorldCommunicator
from echelon.errors import EchelonError, ServerError
from echelon.plan.plan import Plan

if TYPE_CHECKING:
    from echelon.server.client.client import Client
    from echelon.server.local_servers import Servers

#: The servers' files in a checkpoint.
SERVER_FOLDER = "server"
#: Enough for as many servers as a machine could run, without too many files in a checkpoint.
SHARD_COUNT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalServers:
    """Servers that were started elsewhere and outlive the run."""

    address: str  #: of their controller
    secret_file: Path


class ServerLauncher:
    """Starts the servers or connects to external ones. Every rank makes the same calls in the same order."""

    def __init__(self, plan: Plan, ranks: WorldCommunicator, external_servers: ExternalServers | None = None) -> None:
        self._plan, self._ranks, self.external_servers = plan, ranks, external_servers
        #: Of the external servers' controller.
        self.address = "" if external_servers is None else external_servers.address
        self._servers: Servers | None = None
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        """This rank's connection."""
        assert self._client is not None, "open() comes first"
        return self._client

    def open(self, restore: Path | None = None) -> None:
        """Start servers, from the checkpoint in `restore` if given, and connect."""
        from echelon.server import connect
        from echelon.server.local_servers import Servers

        plan, ranks = self._plan, self._ranks
        endpoint: tuple[str, bytes] = "", b""
        with ranks.raise_on_all_ranks():
            if self.external_servers is not None and ranks.world.is_main:
                from echelon.server.protocol.auth import read_secret

                endpoint = self.external_servers.address, read_secret(self.external_servers.secret_file)
            elif ranks.world.is_main:
                self._servers = Servers(
                    plan.server.servers,
                    replicas=plan.server.replicas,
                    shards=SHARD_COUNT,
                    staleness=plan.server.staleness,
                    aggregate=plan.server.staleness == 0,
                    restore=restore,
                ).serve_in_background()
                endpoint = self._servers.address, self._servers.secret
        # Not on a command line or in an environment: the process group is as private as the gradients.
        address, secret = ranks.broadcast_object(endpoint)
        with ranks.raise_on_all_ranks():
            self._client = connect(address, secret=secret, worker=str(ranks.rank))
            if self.external_servers is not None:
                self._require_matching_settings(self.external_servers)

    def _require_matching_settings(self, external_servers: ExternalServers) -> None:
        """Whether gradients are summed, and how many steps ranks may be apart, is fixed when servers start."""
        staleness = self._plan.server.staleness
        expected = {"staleness": staleness, "aggregate": staleness == 0}
        actual = {name: self.client.settings.get(name) for name in expected}
        if actual != expected:
            flags = f"--staleness {staleness}{' --aggregate' * (staleness == 0)}"
            options = "without --staleness" if staleness is None else flags
            raise ServerError(
                f"the servers at {external_servers.address} have staleness={actual['staleness']}, aggregate={actual['aggregate']}, and the plan has "
                f"staleness={'none' if staleness is None else staleness}; start them with `echelon server start ... {options}`, or change the plan"
            )

    def close(self) -> None:
        """Disconnect, and stop the servers once all have."""
        if self._client is not None:
            with contextlib.suppress(EchelonError, OSError):  # rank 0 may have ended them already
                self._client.close()
            self._client = None
        if self._servers is not None:
            self._servers.close()
            self._servers = None
