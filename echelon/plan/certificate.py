"""The certificate: what was verified, against what, and how far off it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from echelon.plan.codec import Document
from echelon.plan.input_digests import describe_differences
from echelon.plan.plan import Plan

#: What a plan was compared with: one device, one process on the host's CPU, or another plan.
ReferenceKind = Literal["device", "host", "plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The largest relative difference among tensors of one kind, and where it was."""

    kind: str  # start, gradient, loss, norm, buffer, parameter, optimizer, copy, draw, output, drift, self, state
    tensors: int
    max_difference: float
    where: str
    bound: float

    @property
    def is_within_bound(self) -> bool:
        """Whether the difference is within the bound."""
        return self.max_difference <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate(Document):
    """A plan computed the same as its reference: for this job, this code and these versions."""

    KIND: ClassVar[str] = "certificate"
    VERSION: ClassVar[int] = 4
    HASH_REQUIRED: ClassVar[bool] = True

    plan: Plan
    job: str  #: hash of the job file's text
    model: str  #: hash of the parameters' names and shapes
    versions: dict[str, str]
    batch: int
    steps: int
    verified: bool
    findings: tuple[Finding, ...]
    divergent: str = ""  #: first tensor in forward order that is off; empty when verified
    #: The same comparison in the plan's own precision, for information: of it findings have only what no rounding does.
    drift: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()  #: for readers: batch statistics local or synchronized, dropout set to zero, ...
    #: What the job was made from, by name: files, variables and arguments that it read, its sources, code and data.
    inputs: dict[str, str] = field(default_factory=dict)
    graph_hash: str = ""  #: hash of the traced operators; empty: they were not traced
    #: Whether two runs of one device agreed. False: nothing can be said of the plan, and `divergent` says where they differ.
    deterministic: bool = True
    reference: ReferenceKind = "device"  #: "plan" is weaker: a mistake that both plans share is not seen
    reference_plan: Plan | None = None  #: that plan

    def __post_init__(self) -> None:
        within_bounds = all(finding.is_within_bound for finding in self.findings)
        if (self.reference == "plan") != (self.reference_plan is not None):
            given = f"reference={self.reference!r} and reference_plan={self.reference_plan}"
            raise ValueError(f"{given}: one implies the other")
        if self.verified and not self.deterministic:
            raise ValueError("verified=True and deterministic=False: a job that differs from itself proves no plan")
        if not self.findings:
            raise ValueError("findings: a proof compares at least one kind of tensor")
        if self.verified != within_bounds:
            found = "all" if within_bounds else "not all"
            raise ValueError(f"verified={self.verified}, but {found} findings are within bounds")
        if self.verified == bool(self.divergent):
            raise ValueError(f"verified={self.verified} and divergent={self.divergent!r}: one of the two is wrong")

    @property
    def reference_description(self) -> str:
        """What it was compared with, in words."""
        descriptions = {"device": "one device", "host": "one process on the CPU"}
        return descriptions.get(self.reference, f'the plan "{self.reference_plan}"')

    @property
    def limitation(self) -> str:
        """What this proof cannot show that one against a single device would; empty where it is as strong."""
        if self.reference != "plan":
            return ""
        return f'it was compared with the plan "{self.reference_plan}", not with one device: an error that both share is not seen'

    def mismatch_reasons(
        self, *, plan: Plan, job: str, model: str, versions: dict[str, str], inputs: Mapping[str, str] | None = None, graph: str = ""
    ) -> list[str]:  # fmt: skip
        """Why this certificate does not cover a run, with both values; empty when it does.

        `inputs` None: unknown, only the job file is compared. `graph` empty: the run was not traced.
        """
        reasons = [] if inputs is None else describe_differences(self.inputs, inputs)
        hashes = [("the job file", self.job, job), ("the parameters' names or shapes", self.model, model)]
        if self.graph_hash and graph:
            hashes.insert(0, ("the traced operators", self.graph_hash, graph))
        for what, certified, now in hashes:
            if certified != now:
                reasons.append(f"{what} changed: certified {certified[:12]}, now {now[:12]}")
        # The model that a plan was made for does not change what it computes; the parameters are compared above.
        if replace(self.plan, model=None) != replace(plan, model=None):
            reasons.append(f'the plan differs: certified "{self.plan}", now "{plan}"')
        for name in sorted(set(self.versions) | set(versions)):
            if self.versions.get(name) != versions.get(name):
                reasons.append(f"{name} differs: certified {self.versions.get(name)}, now {versions.get(name)}")
        return reasons if self.verified else [*reasons, "the verification failed"]
