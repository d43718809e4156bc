"""What a certificate is valid for: hashes of the job file and the model, and the versions that computed it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch import nn

from echelon.errors import JobError
from echelon.plan.document_cache import installed_versions
from echelon.plan.profile import model_fingerprint


def job_hash(spec: str | Path) -> str:
    """Hash of the job file that `file.py` or `file.py:name` refers to, and of the name: one file may hold several jobs."""
    file, _, name = str(spec).rpartition(".py:")
    path = Path(file + ".py" if file else spec)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise JobError(f"{path}: the job file cannot be read ({error}); a certificate is for its text") from error
    return hashlib.sha256(content + b"\0" + (name if file else "job").encode()).hexdigest()


def model_hash(model: nn.Module) -> str:
    """Hash of the parameters' names, shapes and dtypes, as in the profile and in checkpoints."""
    return model_fingerprint((n, p.shape, str(p.dtype).removeprefix("torch.")) for n, p in model.named_parameters())


def versions() -> dict[str, str]:
    installed = installed_versions(("echelon", "torch", "numpy"))
    return {name: installed[name] for name in ("echelon", "torch", "numpy")}
