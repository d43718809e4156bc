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
class Seat:
    """A server of the map: where it listens, on which host, in which life."""

    address: str
    host: str
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class Map:
    """Versioned: what one version says never changes.

    `chains[s]` are the servers of shard s, head first. `epochs[s]` is the version at which its head last changed. `learners[s]` are on
    their way into the chain. `lost` shards have no living replica and no chain; it names who had them last. `sources[s]` is the
    checkpoint folder that a shard was last restored from, and the version that ordered it; `revived` ones were lost while workers
    went on, and went back to it. `horizon`: lives up to this number are over for ever, but for those `kept`: nothing is taken of them, and
    what was known of them is forgotten.
    """

    version: int
    servers: Mapping[str, Seat]
    chains: tuple[tuple[str, ...], ...]
    epochs: tuple[int, ...]
    learners: tuple[tuple[str, ...], ...]
    workers: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    sources: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    revived: frozenset[int] = frozenset()
    horizon: int = 0
    kept: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        shards = len(self.chains)
        if not shards or shards & (shards - 1) or shards > 1 << 15:
            raise DocumentError(f"map: {shards} shards; their number is a power of two up to 32768")
        if len(self.epochs) != shards or len(self.learners) != shards:
            raise DocumentError(
                f"map: {shards} chains, {len(self.epochs)} epochs, {len(self.learners)} learners; one of each per shard"
            )
        for shard, chain in enumerate(self.chains):
            if len(set(chain)) != len(chain) or set(chain) & set(self.learners[shard]):
                raise DocumentError(f"map: shard {shard} names a server twice: {chain} and {self.learners[shard]}")
            if any(server not in self.servers for server in (*chain, *self.learners[shard])):
                raise DocumentError(f"map: shard {shard} lies on {chain}, of which some are not in the map")

    @property
    def shards(self) -> int:
        """How many virtual shards there are: fixed for the job's life."""
        return len(self.chains)

    @cached_property
    def heads(self) -> tuple[str | None, ...]:
        """Per shard who orders its pushes; None where nobody has it."""
        return tuple(chain[0] if chain else None for chain in self.chains)

    @cached_property
    def routes(self) -> Mapping[tuple[str, ...], np.ndarray]:
        """Shards with the same chain, which share frames. Those that nobody has are on none."""
        found: dict[tuple[str, ...], list[int]] = {}
        for shard, chain in enumerate(self.chains):
            if chain:
                found.setdefault(chain, []).append(shard)
        return {chain: np.array(members, np.uint16) for chain, members in found.items()}

    def over(self, life: int) -> bool:
        """Whether this life of a worker has ended for ever."""
        return life <= self.horizon and life not in self.kept

    def headed_by(self, server: str) -> np.ndarray:
        """Per shard whether this server is its head."""
        return np.fromiter((head == server for head in self.heads), bool, self.shards)

    def held_by(self, server: str) -> np.ndarray:
        """Per shard whether this server is in its chain or learns it."""
        return np.fromiter(
            (server in chain or server in learners for chain, learners in zip(self.chains, self.learners, strict=True)),
            bool,
            self.shards,
        )

    def document(self) -> dict[str, Any]:
        """As JSON. Chains are written once each, and per shard the number of its own."""
        kinds = sorted({*self.chains, *self.learners})
        number = {chain: place for place, chain in enumerate(kinds)}
        return {
            "version": self.version,
            "servers": {name: [seat.address, seat.host, seat.incarnation] for name, seat in self.servers.items()},
            "kinds": [list(chain) for chain in kinds],
            "chains": [number[chain] for chain in self.chains],
            "learners": [number[chain] for chain in self.learners],
            "epochs": list(self.epochs),
            "workers": dict(self.workers),
            "lost": {str(shard): list(chain) for shard, chain in self.lost.items()},
            "revived": sorted(self.revived),
            "horizon": self.horizon,
            "kept": sorted(self.kept),
            "sources": {str(shard): list(source) for shard, source in self.sources.items()},
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Map:
        """Read what `document` wrote; DocumentError for anything else."""
        try:
            kinds = [tuple(str(server) for server in chain) for chain in document["kinds"]]
            return cls(
                version=int(document["version"]),
                servers={
                    str(name): Seat(address=str(address), host=str(host), incarnation=int(incarnation))
                    for name, (address, host, incarnation) in document["servers"].items()
                },
                chains=tuple(kinds[number] for number in document["chains"]),
                learners=tuple(kinds[number] for number in document["learners"]),
                epochs=tuple(int(epoch) for epoch in document["epochs"]),
                workers={str(name): int(incarnation) for name, incarnation in document["workers"].items()},
                revived=frozenset(int(shard) for shard in document["revived"]),
                horizon=int(document.get("horizon", 0)),
                kept=frozenset(int(life) for life in document.get("kept", ())),
                lost={int(shard): tuple(map(str, chain)) for shard, chain in document["lost"].items()},
                sources={
                    int(shard): (str(path), int(version)) for shard, (path, version) in document["sources"].items()
                },
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            text = json.dumps(document, default=str)[:120]
            raise DocumentError(
                f"map: {type(error).__name__}: {error} in {text}; it is not one, or of another version"
            ) from None


def empty(shards: int) -> Map:
    """Version 0: nobody holds anything."""
    return Map(version=0, servers={}, chains=((),) * shards, epochs=(0,) * shards, learners=((),) * shards)
