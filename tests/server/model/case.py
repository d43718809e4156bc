"""What is explored, what was found, and what an invariant that broke says."""

from __future__ import annotations

from dataclasses import dataclass


class Broken(AssertionError):  # noqa: N818 (what it found)
    """An invariant does not hold; `trail` says how one gets there."""

    def __init__(self, what: str, trail: tuple[str, ...] = ()) -> None:
        super().__init__(what)
        self.what, self.trail = what, trail


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is explored."""

    servers: int = 2
    replicas: int = 2
    shards: int = 1
    workers: int = 1
    pushes: int = 2
    crash: int = 0
    judge: int = 0
    cut: int = 0
    controller: int = 0
    join: int = 0
    drain: int = 0
    aggregate: bool = False
    #: Learners that caught up are taken in one by one, not all together.
    single: bool = False
    #: What has happened already (labels of steps; "calm": until nothing moves); the budget pays for it.
    before: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Found:
    """What an exploration saw."""

    states: int
    ends: int
    seconds: float
    whole: bool
