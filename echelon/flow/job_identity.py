"""What identifies a job: everything that decides what it computes, each part by name and digest.

    source job.py        3fa9...   text of each of the user's own modules
    file config.json     77ab...   files, folders, variables and arguments that were read while the job was made
    environment LR       0.5
    argument --lr        0.01
    code loss            9c1e...   functions with their closures and the user's functions and values that they name
    data                 41d0...   kind, length and content (of large data at fixed positions)
    weights              b7c2...   content of the file or checkpoint
    setting batch_size   64
    version torch        2.13.0

No trace is needed, so a launcher and every rank find the same at once when the job is loaded. Parameter values that a job holds are
kept apart: two launches of a script that sets no seed differ in them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.flow.job_inputs import relative_names
from echelon.plan.document_cache import installed_versions, user_source_files
from echelon.plan.input_digests import digest_file

if TYPE_CHECKING:
    from echelon.flow.job_code import ValueDigest
    from echelon.job import Job
    from echelon.plan.certificate import Certificate
    from echelon.plan.profile import Profile

#: Packages whose version decides what is computed; transformers only where it is loaded.
_PACKAGES = ("torch", "echelon", "numpy")
#: How fields of a job count. A field in none of these counts by its code: a new one is never left out.
SETTING_FIELDS = ("batch_size", "seed", "clip_norm", "precision", "drop_last")
DATA_FIELDS = ("data", "eval_data", "warmup_data")
EXEMPT_FIELDS = {
    "epochs": "how long to train does not change what a step computes",
    "steps": "how long to train does not change what a step computes",
    "name": "names the run folder",
}
#: Functions in whose code a number may stand for the length of the training.
_LENGTH_DEPENDENT_FIELDS = ("optimizer", "lr_schedule")


@dataclass(frozen=True, kw_only=True)
class JobIdentity:
    """What a job is made from: digests by the parts' names."""

    digests: dict[str, str]
    #: By field, the values of parameters and of a model's buffers that the job holds.
    parameter_values: dict[str, str] = field(default_factory=dict)
    #: By field, the code with numbers that are the length of the training masked.
    length_free_code: dict[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """All parts in one hash."""
        return hashlib.sha256(json.dumps(self.digests, sort_keys=True).encode()).hexdigest()

    def inputs(self) -> dict[str, str]:
        """Files, folders, variables and arguments only."""
        kinds = ("file", "files", "folder", "environment", "argument")
        return {name: digest for name, digest in self.digests.items() if name.partition(" ")[0] in kinds}

    @property
    def proof_inputs(self) -> dict[str, str]:
        """What a certificate compares by name; versions stand apart in it."""
        return {name: digest for name, digest in self.digests.items() if not name.startswith("version ")}

    @property
    def versions(self) -> dict[str, str]:
        """The versions on which a proof depends."""
        names = [name for name in self.digests if name.startswith("version ")]
        return {name.removeprefix("version "): self.digests[name] for name in names}


def identify_job(job: Job, function: str, recorded_inputs: Mapping[str, str], folder: Path | None) -> JobIdentity:
    """The identity of the job that `function` has just made, while `recorded_inputs` were read."""
    sources = {f"source {path}": digest_file(path) for path in user_source_files(sys.modules) if path.is_file()}
    digests = relative_names({**sources, **recorded_inputs}, folder)
    digests["function"] = function
    parameter_values, length_free_code, lengths = {}, {}, _training_lengths(job)
    for name, (key, value) in _list_described_fields(job).items():
        digest = _undo_training(value, _describe_field(name, value, folder))
        digests[key] = digest.code
        if digest.parameter_values:
            parameter_values[name] = digest.parameter_values
        if name in _LENGTH_DEPENDENT_FIELDS:
            length_free_code[name] = _describe_field(name, value, folder, lengths).code
    if job.weights is not None:
        from echelon.flow.job_code import digest_weights

        digests["weights"] = digest_weights(job.weights)
    digests |= {f"setting {name}": str(getattr(job, name)) for name in SETTING_FIELDS}
    packages = [*_PACKAGES, *(["transformers"] if "transformers" in sys.modules else [])]
    digests |= {f"version {name}": version for name, version in installed_versions(packages).items()}
    digests = dict(sorted(digests.items()))
    return JobIdentity(digests=digests, parameter_values=parameter_values, length_free_code=length_free_code)


def _list_described_fields(job: Job) -> dict[str, tuple[str, Any]]:
    """By name, the part's name and the value of every field that counts by code or content."""
    described_fields: dict[str, tuple[str, Any]] = {}
    for name in (job_field.name for job_field in fields(job)):
        value = getattr(job, name)
        if name == "metrics":
            described_fields |= {f"metrics.{key}": (f"code metrics.{key}", metric) for key, metric in value.items()}
        elif value is not None and name not in (*SETTING_FIELDS, *EXEMPT_FIELDS, "weights"):
            described_fields[name] = (name if name in DATA_FIELDS else f"code {name}", value)
    return described_fields


def _describe_field(name: str, value: Any, folder: Path | None, lengths: Collection[int] = ()) -> ValueDigest:
    from echelon.flow.job_code import digest_value

    if name in DATA_FIELDS:
        return digest_value(value, include_length=True)
    return digest_value(value, folder, is_model=name == "model", lengths=lengths)


def _training_lengths(job: Job) -> set[int]:
    """Numbers in which a script may give the length: epochs, steps, and steps of all epochs."""
    lengths = {count for count in (job.epochs, job.steps) if count is not None}
    try:
        samples = len(job.data)
    except Exception:  # a stream, or a set whose length fails
        return lengths
    epoch_steps = (samples // job.batch_size, -(-samples // job.batch_size))
    return lengths | ({job.epochs * count for count in epoch_steps} if job.epochs else set())


#: By the id of an object that a training in this process changed: the object, its digest after, and before.
_trained_objects: dict[int, list[tuple[weakref.ref[Any], ValueDigest, ValueDigest]]] = {}


def remember_changes(job: Job, identity: JobIdentity, folder: Path | None) -> None:
    """Note what a training changed in the job's own objects (counters, a module's weights): they still stand for what the job was made with."""
    from echelon.flow.job_code import ValueDigest

    for name, (key, value) in _list_described_fields(job).items():
        before = ValueDigest(identity.digests.get(key, ""), identity.parameter_values.get(name, ""))
        after = _describe_field(name, value, folder)
        if after == before:
            continue
        with contextlib.suppress(TypeError):  # an object without weak references
            entries = [entry for entry in _trained_objects.get(id(value), ()) if entry[0]() is value]
            _trained_objects[id(value)] = [*entries, (weakref.ref(value), after, before)]


def _undo_training(value: Any, current: ValueDigest) -> ValueDigest:
    """The digest of an object before a training in this process changed it to what it is."""
    for reference, after, before in reversed(_trained_objects.get(id(value), ())):
        if reference() is value and after == current:
            return before
    return current


def bind_certificate(certificate: Certificate, identity: JobIdentity, profile: Profile | None) -> Certificate:
    """`certificate` for the job with this identity."""
    graph = profile.graph_hash if profile is not None else ""
    return replace(certificate, inputs=identity.proof_inputs, versions=identity.versions, graph_hash=graph)
