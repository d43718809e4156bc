"""The gate: a run that requires a certificate starts only with one that covers it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from echelon.errors import VerificationError
from echelon.plan.certificate import Certificate
from echelon.plan.plan import Plan


def require_certificate(
    path: str | Path,
    *,
    plan: Plan,
    job: str,
    model: str,
    versions: dict[str, str],
    inputs: Mapping[str, str] | None = None,
    graph: str = "",
) -> Certificate:
    """The certificate in `path`, if it covers this plan, job, model and these versions; else every reason why not."""
    if not Path(path).is_file():
        raise VerificationError(f"{path}: no certificate there; `echelon verify` writes one")
    certificate = Certificate.load(path)
    reasons = certificate.mismatch_reasons(
        plan=plan, job=job, model=model, versions=versions, inputs=inputs, graph=graph
    )
    if reasons:
        raise VerificationError(
            f"{path} does not cover this run; verify again:\n" + "\n".join(f"  - {reason}" for reason in reasons)
        )
    return certificate
