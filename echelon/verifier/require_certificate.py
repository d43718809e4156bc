"""Admit a run that requires a certificate only with one that covers it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from echelon.errors import VerificationError
from echelon.plan.certificate import Certificate


def require_certificate(path: str | Path, **run: Any) -> Certificate:
    """The certificate in `path`, if it covers the run (`Certificate.mismatch_reasons`); else raises every reason why not."""
    if not Path(path).is_file():
        raise VerificationError(f"{path}: no certificate there; `echelon verify` writes one")
    certificate = Certificate.load(path)
    reasons = "".join(f"\n  - {reason}" for reason in certificate.mismatch_reasons(**run))
    if reasons:
        raise VerificationError(f"{path} does not cover this run; verify again:{reasons}")
    return certificate
