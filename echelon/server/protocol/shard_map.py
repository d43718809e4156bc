"""Which server holds which shards: a frozen, versioned document that only the controller writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from echelon.errors import DocumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEntry:
    """A server: where it listens, on which host, as which incarnation."""

    address: str
    host: str
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class ShardMap:
    """Versioned: a version never changes.

    `chains[s]`: the servers of shard s, head first. `epochs[s]`: the version at which its head last changed. `learners[s]`: servers that are
    catching up to join the chain. `lost_shards` have no living replica and no chain, only their last servers. `restored_from[s]`: the
    checkpoint folder that a shard was last restored from, and the version that ordered it; `rolled_back_shards` were lost while workers
    continued. Worker incarnations up to `horizon` are over and forgotten, except `retained_incarnations`: their pushes are refused.
    """

    version: int
    servers: Mapping[str, ServerEntry]
    chains: tuple[tuple[str, ...], ...]
    epochs: tuple[int, ...]
    learners: tuple[tuple[str, ...], ...]
    workers: Mapping[str, int] = field(default_factory=dict)
    lost_shards: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    restored_from: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    rolled_back_shards: frozenset[int] = frozenset()
    horizon: int = 0
    retained_incarnations: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        num_shards = len(self.chains)
        if not num_shards or num_shards & (num_shards - 1) or num_shards > 1 << 15:
            raise DocumentError(f"map: {num_shards} shards; the number must be a power of two up to 32768")
        if len(self.epochs) != num_shards or len(self.learners) != num_shards:
            counts = f"{num_shards} chains, {len(self.epochs)} epochs, {len(self.learners)} learners"
            raise DocumentError(f"map: {counts}; there must be one of each per shard")
        for shard, chain in enumerate(self.chains):
            if len(set(chain)) != len(chain) or set(chain) & set(self.learners[shard]):
                raise DocumentError(f"map: shard {shard} names a server twice: {chain} and {self.learners[shard]}")
            if any(server not in self.servers for server in (*chain, *self.learners[shard])):
                raise DocumentError(f"map: some servers of shard {shard}, {chain}, are not in the map")

    @property
    def num_shards(self) -> int:
        return len(self.chains)

    @cached_property
    def heads(self) -> tuple[str | None, ...]:
        """The head of each shard, which orders its pushes; None for lost shards."""
        return tuple(chain[0] if chain else None for chain in self.chains)

    def is_expired(self, incarnation: int) -> bool:
        """Whether this incarnation of a worker is over for good."""
        return incarnation <= self.horizon and incarnation not in self.retained_incarnations

    def why_superseded(self, worker: str, incarnation: int) -> str | None:
        """Why nothing may be taken from this incarnation of a worker; None if it may."""
        if self.workers.get(worker, 0) > incarnation:
            cause = (
                f"worker {worker} was restarted after its incarnation {incarnation}, or another worker uses its name"
            )
            return f"{cause}; give each worker its own name (worker=)"
        if self.is_expired(incarnation):
            return f"worker {worker} was away for too long and has expired; restart it"
        return None

    def head_mask(self, server: str) -> np.ndarray:
        """The shards whose head is this server."""
        return np.fromiter((head == server for head in self.heads), bool, self.num_shards)

    def replica_mask(self, server: str) -> np.ndarray:
        """The shards that this server holds or learns."""
        replicas = (chain + learners for chain, learners in zip(self.chains, self.learners, strict=True))
        return np.fromiter((server in names for names in replicas), bool, self.num_shards)

    def to_document(self) -> dict[str, Any]:
        """As JSON: each chain once, and per shard the number of its chain."""
        distinct_chains = sorted({*self.chains, *self.learners})
        chain_index = {chain: index for index, chain in enumerate(distinct_chains)}
        return {
            "version": self.version,
            "servers": {name: [entry.address, entry.host, entry.incarnation] for name, entry in self.servers.items()},
            "kinds": [list(chain) for chain in distinct_chains],
            "chains": [chain_index[chain] for chain in self.chains],
            "learners": [chain_index[chain] for chain in self.learners],
            "epochs": list(self.epochs),
            "workers": dict(self.workers),
            "lost": {str(shard): list(chain) for shard, chain in self.lost_shards.items()},
            "revived": sorted(self.rolled_back_shards),
            "horizon": self.horizon,
            "kept": sorted(self.retained_incarnations),
            "sources": {str(shard): list(source) for shard, source in self.restored_from.items()},
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> ShardMap:
        """The inverse of `to_document`; DocumentError for anything else."""
        try:
            distinct_chains = [tuple(str(server) for server in chain) for chain in document["kinds"]]
            return cls(
                version=int(document["version"]),
                servers={
                    str(name): ServerEntry(address=str(address), host=str(host), incarnation=int(incarnation))
                    for name, (address, host, incarnation) in document["servers"].items()
                },
                chains=tuple(distinct_chains[index] for index in document["chains"]),
                learners=tuple(distinct_chains[index] for index in document["learners"]),
                epochs=tuple(int(epoch) for epoch in document["epochs"]),
                workers={str(name): int(incarnation) for name, incarnation in document["workers"].items()},
                rolled_back_shards=frozenset(int(shard) for shard in document["revived"]),
                horizon=int(document.get("horizon", 0)),
                retained_incarnations=frozenset(int(retained) for retained in document.get("kept", ())),
                lost_shards={int(shard): tuple(map(str, chain)) for shard, chain in document["lost"].items()},
                restored_from={
                    int(shard): (str(path), int(version)) for shard, (path, version) in document["sources"].items()
                },
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            text = json.dumps(document, default=str)[:120]
            raise DocumentError(f"map: {type(error).__name__}: {error} in {text}; not a map of this version") from None


def empty_map(num_shards: int) -> ShardMap:
    """Version 0, in which no server holds a shard."""
    nobody = ((),) * num_shards
    return ShardMap(version=0, servers={}, chains=nobody, epochs=(0,) * num_shards, learners=nobody)
