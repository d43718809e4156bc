"""What a training returns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.plan.certificate import Certificate
from echelon.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrainResult:
    """The outcome of a training, the same on every rank and in the process that started the ranks."""

    #: Steps done in total, before and after a resume.
    steps: int
    #: Loss of the last step; None: a finished run was started again and its log is lost.
    loss: float | None
    #: Metrics of the last evaluation.
    metrics: Mapping[str, float]
    #: Seconds that this training took; earlier ones of a resumed run do not count.
    seconds: float
    #: The run folder, with checkpoints, events, documents and the report.
    folder: Path
    #: The newest checkpoint.
    checkpoint: Path | None
    #: The plan that was executed.
    plan: Plan
    #: The proof that covers the plan; None: there was nothing to prove, or `verify=False`.
    certificate: Certificate | None = None
    #: Whether a signal (Ctrl-C, SIGTERM) stopped it before its last step; the same call resumes it.
    interrupted: bool = False

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name}={value:.6g}" for name, value in self.metrics.items())
        loss = "unknown" if self.loss is None else f"{self.loss:.6g}"
        state = "interrupted" if self.interrupted else "finished"
        return (
            f"TrainResult({state} at step {self.steps} in {self.seconds:.1f} s, loss={loss}, metrics=({metrics}), "
            f'plan="{self.plan}", folder={str(self.folder)!r})'
        )

    def to_json(self) -> str:
        """This result as text for another process."""
        plain: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        plain |= {"metrics": dict(self.metrics), "plan": self.plan.to_json(), "folder": str(self.folder)}
        plain["checkpoint"] = None if self.checkpoint is None else str(self.checkpoint)
        plain["certificate"] = None if self.certificate is None else self.certificate.to_json()
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str) -> TrainResult:
        plain = json.loads(text)
        plain |= {"folder": Path(plain["folder"]), "plan": Plan.from_json(plain["plan"])}
        plain["checkpoint"] = plain["checkpoint"] and Path(plain["checkpoint"])
        plain["certificate"] = plain["certificate"] and Certificate.from_json(plain["certificate"])
        return cls(**plain)
