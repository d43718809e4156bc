"""What identifies a job: everything that decides what it computes, each part by name and digest.

    source job.py        3fa9...   text of each of the user's own modules
    file config.json     77ab...   files, folders, variables and arguments that were read while the job was made
    environment LR       0.5
    argument --lr        0.01
    code loss            9c1e...   functions with what they hold and the user's functions and values that they name
    data                 41d0...   kind, length, shapes, samples at fixed positions
    setting batch        64
    version torch        2.13.0

No trace and no parameter is needed, so that a launcher and every rank find the same in milliseconds once the job is loaded.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.flow.job_inputs import readable
from echelon.plan.inputs import digest_file, digest_text
from echelon.plan.store import installed_versions, user_files

if TYPE_CHECKING:
    from echelon.job import Job
    from echelon.plan.certificate import Certificate
    from echelon.plan.profile import Profile

#: Packages whose version decides what is computed; those after the first three only where they are loaded.
_PACKAGES = ("torch", "echelon", "numpy", "transformers")
_FUNCTIONS = ("model", "loss", "optimizer", "schedule", "inputs", "collate")
#: How long to train does not change what a step computes.
_SETTINGS = ("batch", "seed", "clip", "precision", "drop_last")


@dataclass(frozen=True, kw_only=True)
class JobIdentity:
    """What a job is made from: readable names of the parts, and their digests."""

    parts: dict[str, str]

    @cached_property
    def digest(self) -> str:
        """All parts in one hash."""
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()

    def inputs(self) -> dict[str, str]:
        """Files, folders, variables and arguments only."""
        kinds = ("file", "files", "folder", "environment", "argument")
        return {name: digest for name, digest in self.parts.items() if name.partition(" ")[0] in kinds}

    @property
    def proof_inputs(self) -> dict[str, str]:
        """What a certificate compares by name; versions stand apart in it."""
        return {name: digest for name, digest in self.parts.items() if not name.startswith("version ")}

    @property
    def versions(self) -> dict[str, str]:
        """The versions on which a proof depends."""
        return {
            name.removeprefix("version "): digest for name, digest in self.parts.items() if name.startswith("version ")
        }


def identify(job: Job, *, function: str, read: Mapping[str, str], folder: Path | None) -> JobIdentity:
    """The identity of a job that was just loaded. `read`: inputs that were recorded meanwhile, `function`: its name."""
    from echelon.flow.job_code import describe_code, describe_data

    sources = {f"source {path}": digest_file(path) for path in user_files(sys.modules) if path.is_file()}
    parts = readable({**sources, **read}, folder)
    parts["function"] = function
    for name in _FUNCTIONS:
        value = getattr(job, name)
        if value is not None:
            parts[f"code {name}"] = describe_code(value, folder)
    parts |= {f"code metrics.{name}": describe_code(metric, folder) for name, metric in job.metrics.items()}
    for name in ("data", "evaluation", "warmup_data"):
        value = getattr(job, name)
        if value is not None:
            parts[name] = describe_data(value)
    if job.weights is not None:
        parts["weights"] = digest_text(str(job.weights))
    parts |= {f"setting {name}": str(getattr(job, name)) for name in _SETTINGS}
    loaded = [name for name in _PACKAGES if name in _PACKAGES[:3] or name in sys.modules]
    parts |= {f"version {name}": version for name, version in installed_versions(loaded).items()}
    return JobIdentity(parts=dict(sorted(parts.items())))


def cover(certificate: Certificate, identity: JobIdentity, profile: Profile | None) -> Certificate:
    """`certificate`, made out to the job with this identity."""
    graph = profile.graph if profile is not None else ""
    return replace(certificate, inputs=identity.proof_inputs, versions=identity.versions, graph=graph)
