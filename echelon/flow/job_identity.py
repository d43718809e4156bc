"""What identifies a job: everything that decides what it computes, each part by name and digest.

    source job.py        3fa9...   text of each of the user's own modules
    file config.json     77ab...   files, folders, variables and arguments that were read while the job was made
    environment LR       0.5
    argument --lr        0.01
    code loss            9c1e...   functions with what they hold and the user's functions and values that they name
    data                 41d0...   kind, length and content (of large data at fixed positions)
    weights              b7c2...   content of the file or checkpoint
    setting batch        64
    version torch        2.13.0

No trace is needed, so that a launcher and every rank find the same in a moment once the job is loaded. Values of parameters that a
job holds are apart from these: two launches of a script that sets no seed differ in them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.flow.job_inputs import readable
from echelon.plan.document_cache import installed_versions, user_files
from echelon.plan.input_digests import digest_file

if TYPE_CHECKING:
    from echelon.flow.job_code import Description
    from echelon.job import Job
    from echelon.plan.certificate import Certificate
    from echelon.plan.profile import Profile

#: Packages whose version decides what is computed; those after the first three only where they are loaded.
_PACKAGES = ("torch", "echelon", "numpy", "transformers")
#: How fields of a job count. A field in none of these counts by its code, so that a new one is never left out.
SETTINGS = ("batch", "seed", "clip", "precision", "drop_last")
DATA = ("data", "evaluation", "warmup_data")
EXEMPT = {
    "epochs": "how long to train does not change what a step computes",
    "steps": "how long to train does not change what a step computes",
    "name": "names the run folder",
}
#: Functions in whose code a number may stand for the length of the training.
_OF_LENGTH = ("optimizer", "schedule")


@dataclass(frozen=True, kw_only=True)
class JobIdentity:
    """What a job is made from: readable names of the parts, and their digests."""

    parts: dict[str, str]
    #: By field, the values of parameters and of a model's buffers that the job itself holds.
    values: dict[str, str] = field(default_factory=dict)
    #: By field, the code where numbers that are the length of the training count as such.
    by_length: dict[str, str] = field(default_factory=dict)

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
    sources = {f"source {path}": digest_file(path) for path in user_files(sys.modules) if path.is_file()}
    parts = readable({**sources, **read}, folder)
    parts["function"] = function
    values, by_length, lengths = {}, {}, _lengths(job)
    for name, (key, value) in _described_fields(job).items():
        found = _before_training(name, value, _describe(name, value, folder))
        parts[key] = found.code
        if found.values:
            values[name] = found.values
        if name in _OF_LENGTH:
            by_length[name] = _describe(name, value, folder, lengths).code
    if job.weights is not None:
        from echelon.flow.job_code import describe_weights

        parts["weights"] = describe_weights(job.weights)
    parts |= {f"setting {name}": str(getattr(job, name)) for name in SETTINGS}
    loaded = [name for name in _PACKAGES if name in _PACKAGES[:3] or name in sys.modules]
    parts |= {f"version {name}": version for name, version in installed_versions(loaded).items()}
    return JobIdentity(parts=dict(sorted(parts.items())), values=values, by_length=by_length)


def _described_fields(job: Job) -> dict[str, tuple[str, Any]]:
    """By name, the part's name and the value of every field that counts by code or content."""
    found: dict[str, tuple[str, Any]] = {}
    for name in (each.name for each in fields(job)):
        value = getattr(job, name)
        if name == "metrics":
            found |= {f"metrics.{key}": (f"code metrics.{key}", metric) for key, metric in value.items()}
        elif value is not None and name not in (*SETTINGS, *EXEMPT, "weights"):
            found[name] = (name if name in DATA else f"code {name}", value)
    return found


def _describe(name: str, value: Any, folder: Path | None, lengths: Collection[int] = ()) -> Description:
    from echelon.flow.job_code import describe

    if name in DATA:
        return describe(value, length=True)
    return describe(value, folder, model=name == "model", lengths=lengths)


def _lengths(job: Job) -> set[int]:
    """Numbers in which a script may give the length: epochs, steps, and steps of all epochs."""
    found = {each for each in (job.epochs, job.steps) if each is not None}
    try:
        size = len(job.data)
    except Exception:  # a stream, or a set whose length fails
        return found
    return found | {(job.epochs or 0) * each for each in (size // job.batch, -(-size // job.batch)) if job.epochs}


#: By the id of an object that a training in this process changed: the object, what it became, and what it was.
_changed: dict[int, list[tuple[weakref.ref[Any], Description, Description]]] = {}


def remember_changes(job: Job, identity: JobIdentity, folder: Path | None) -> None:
    """Note what a training changed in the job's own objects (counters, a module's weights): they are still what the job was made with."""
    from echelon.flow.job_code import Description

    for name, (key, value) in _described_fields(job).items():
        before = Description(identity.parts.get(key, ""), identity.values.get(name, ""))
        after = _describe(name, value, folder)
        if after == before:
            continue
        try:
            here = weakref.ref(value)
        except TypeError:
            continue
        known = [each for each in _changed.get(id(value), ()) if each[0]() is value]
        _changed[id(value)] = [*known, (here, after, before)]


def _before_training(name: str, value: Any, now: Description) -> Description:
    """What an object was, where it is as a training in this process left it."""
    for seen, after, before in reversed(_changed.get(id(value), ())):
        if seen() is value and after == now:
            return before
    return now


def cover(certificate: Certificate, identity: JobIdentity, profile: Profile | None) -> Certificate:
    """`certificate`, made out to the job with this identity."""
    graph = profile.graph if profile is not None else ""
    return replace(certificate, inputs=identity.proof_inputs, versions=identity.versions, graph=graph)
