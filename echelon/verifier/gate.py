"""The gate: a run that requires a certificate starts only with one that covers it."""

from __future__ import annotations

from pathlib import Path

from echelon.errors import VerificationError
from echelon.plan.certificate import Certificate
from echelon.plan.plan import Plan


def require(path: str | Path, *, plan: Plan, job: str, model: str, versions: dict[str, str]) -> Certificate:
    """The certificate in `path`, if it covers this plan, job file, model and these versions; else every reason why not."""
    if not Path(path).is_file():
        raise VerificationError(f"{path}: no certificate there; `echelon verify` writes one")
    certificate = Certificate.load(path)
    reasons = certificate.stale(plan=plan, job=job, model=model, versions=versions)
    if reasons:
        raise VerificationError(
            f"{path} does not cover this run; verify again:\n" + "\n".join(f"  - {each}" for each in reasons)
        )
    return certificate
