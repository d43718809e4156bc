"""The parameter server: sharded, replicated, asynchronous within a bound; no acknowledged push is lost.

    from echelon.server import Servers, Table, connect

    with Servers(2, replicas=2) as servers, connect(servers.address, secret=servers.secret) as client:
        client.declare(Table(name="emb", dim=64))
        rows = client.pull({"emb": ids})["emb"]
        client.push({"emb": (ids, gradients)})

Names are imported on first use, and numba, which compiles the kernels, with a server or client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.server.client.client import Client, connect
    from echelon.server.local_servers import Servers
    from echelon.server.protocol.specs import Dense, Init, Rule, Table

_EXPORTS = {
    "Servers": "local_servers",
    "connect": "client.client",
    "Client": "client.client",
    "Table": "protocol.specs",
    "Dense": "protocol.specs",
    "Rule": "protocol.specs",
    "Init": "protocol.specs",
}

__all__ = ["Servers", "connect", "Client", "Table", "Dense", "Rule", "Init"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"echelon.server.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'echelon.server' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
