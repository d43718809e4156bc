"""Which server holds what: one frozen document, written by the controller alone, known to everyone by its version."""

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
    """A server of the map: where it listens, on which host, in which life."""

    address: str
    host: str
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class ShardMap:
    """Versioned: what one version says never changes.

    `chains[s]` are the servers of shard s, head first. `epochs[s]` is the version at which its head last changed. `learners[s]` are on
    their way into the chain. `lost_shards` shards have no living replica and no chain; it names who had them last. `sources[s]` is the
    checkpoint folder that a shard was last restored from, and the version that ordered it; `rolled_back_shards` ones were lost while workers
    went on, and went back to it. `horizon`: lives up to this number are over for ever, but for those `retained_incarnations`: nothing is taken of them, and
    what was known of them is forgotten.
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
            raise DocumentError(f"map: {num_shards} shards; their number is a power of two up to 32768")
        if len(self.epochs) != num_shards or len(self.learners) != num_shards:
            raise DocumentError(
                f"map: {num_shards} chains, {len(self.epochs)} epochs, {len(self.learners)} learners; one of each per shard"
            )
        for shard, chain in enumerate(self.chains):
            if len(set(chain)) != len(chain) or set(chain) & set(self.learners[shard]):
                raise DocumentError(f"map: shard {shard} names a server twice: {chain} and {self.learners[shard]}")
            if any(server not in self.servers for server in (*chain, *self.learners[shard])):
                raise DocumentError(f"map: shard {shard} lies on {chain}, of which some are not in the map")

    @property
    def num_shards(self) -> int:
        """How many virtual shards there are: fixed for the job's life."""
        return len(self.chains)

    @cached_property
    def heads(self) -> tuple[str | None, ...]:
        """Per shard who orders its pushes; None where nobody has it."""
        return tuple(chain[0] if chain else None for chain in self.chains)

    @cached_property
    def routes(self) -> Mapping[tuple[str, ...], np.ndarray]:
        """Shards with the same chain, which share frames. Those that nobody has are on none."""
        shards_by_chain: dict[tuple[str, ...], list[int]] = {}
        for shard, chain in enumerate(self.chains):
            if chain:
                shards_by_chain.setdefault(chain, []).append(shard)
        return {chain: np.array(shards, np.uint16) for chain, shards in shards_by_chain.items()}

    def is_expired(self, incarnation: int) -> bool:
        """Whether this life of a worker has ended for ever."""
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
        """Per shard whether this server is its head."""
        return np.fromiter((head == server for head in self.heads), bool, self.num_shards)

    def replica_mask(self, server: str) -> np.ndarray:
        """Per shard whether this server is in its chain or learns it."""
        return np.fromiter(
            (server in chain or server in learners for chain, learners in zip(self.chains, self.learners, strict=True)),
            bool,
            self.num_shards,
        )

    def to_document(self) -> dict[str, Any]:
        """As JSON. Chains are written once each, and per shard the number of its own."""
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
        """Read what `document` wrote; DocumentError for anything else."""
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
            raise DocumentError(
                f"map: {type(error).__name__}: {error} in {text}; it is not one, or of another version"
            ) from None


def empty_map(num_shards: int) -> ShardMap:
    """Version 0: nobody holds anything."""
    return ShardMap(
        version=0, servers={}, chains=((),) * num_shards, epochs=(0,) * num_shards, learners=((),) * num_shards
    )
