"""The certificate: what was verified, against what, and how far off it was."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from echelon.plan.codec import Document
from echelon.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The largest relative difference among tensors of one kind, and where it was."""

    kind: str  # loss, gradient, norm, parameter, buffer, optimizer
    tensors: int
    worst: float
    where: str
    bound: float

    @property
    def good(self) -> bool:
        """Whether the difference is within the bound."""
        return self.worst <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate(Document):
    """A plan computed the same as one device: for this job, this code and these versions."""

    KIND: ClassVar[str] = "certificate"
    SEALED: ClassVar[bool] = True

    plan: Plan
    job: str  #: hash of the job file's text
    model: str  #: hash of the parameters' names and shapes
    versions: dict[str, str]
    batch: int
    steps: int
    verified: bool
    findings: tuple[Finding, ...]
    #: First tensor in forward order that is off; empty when verified.
    divergent: str = ""
    #: The same comparison in the plan's own precision, for information.
    drift: tuple[Finding, ...] = ()
    #: What a reader must know: batch statistics local or synchronised, dropout set to zero, parts in fp32.
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.findings:
            raise ValueError("findings: a proof compares at least one kind of tensor")
        good = all(finding.good for finding in self.findings)
        if self.verified != good:
            raise ValueError(f"verified={self.verified}, but {'all' if good else 'not all'} findings are within bounds")
        if self.verified == bool(self.divergent):
            raise ValueError(f"verified={self.verified} and divergent={self.divergent!r}: one of the two is wrong")

    def stale(self, *, plan: Plan, job: str, model: str, versions: dict[str, str]) -> list[str]:
        """Why this certificate does not cover a run; empty when it does. Both sides are named."""
        reasons = []
        if self.job != job:
            reasons.append(f"the job file changed: certified {self.job[:12]}, now {job[:12]}")
        if self.model != model:
            reasons.append(f"the parameters' names or shapes changed: certified {self.model[:12]}, now {model[:12]}")
        # For which model a plan was made does not change what it computes; the parameters are compared above.
        if replace(self.plan, model=None) != replace(plan, model=None):
            reasons.append(f'the plan differs: certified "{self.plan}", now "{plan}"')
        for name in sorted(set(self.versions) | set(versions)):
            if self.versions.get(name) != versions.get(name):
                reasons.append(f"{name} differs: certified {self.versions.get(name)}, now {versions.get(name)}")
        if not self.verified:
            reasons.append("the verification failed")
        return reasons
