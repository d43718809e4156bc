"""Choose what the plan is compared with: one device, the host's CPU or, for models that fit on neither, another plan.

Another plan is weaker, and the certificate says so: an error that both plans share stays unseen.
"""

from __future__ import annotations

import dataclasses

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from echelon.errors import EchelonError, VerificationError
from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan import format_units
from echelon.plan.certificate import ReferenceKind
from echelon.plan.check import require_executable
from echelon.plan.check_model import splits_batch
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.plan.text import from_text
from echelon.trials.shape_model import build_fake_model
from echelon.trials.trial_context import trial_context

#: Bytes of one parameter with its gradient and Adam's two states, in float64.
_BYTES_PER_PARAMETER = 4 * 8
#: A model that needs so many times less than is free fits without a profile.
_SAFETY_FACTOR = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceChoice:
    """What the plan is compared with: one device, the host's CPU, or another `plan`. `reason` is empty for one device."""

    kind: ReferenceKind = "device"
    plan: Plan | None = None
    reason: str = ""

    @property
    def note(self) -> str:
        if self.kind == "host":
            return f"reference: one process on the host's CPU, {self.reason}"
        if self.kind == "plan":
            return f"reference: {self.plan}, {self.reason}: an error that both plans share is not seen"
        return ""


def free_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


@trial_context()
def fits_easily(job: Job, memory: int) -> bool:
    """Whether the model is far smaller than `memory`; allocates nothing."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        elements = sum(value.numel() for value in build_fake_model(job).parameters())
    return elements * _BYTES_PER_PARAMETER * _SAFETY_FACTOR <= memory


def float64_memory(profile: Profile) -> float:
    """Bytes of a step of the whole global batch on one device, all in float64."""
    parameter_bytes = 8 * profile.elements
    ratio = parameter_bytes / max(profile.bytes, 1)
    activations = max(moment.alive.at(profile.batch) for moment in profile.moments)
    activations *= 2 if profile.precision in ("fp32", "tf32") else 4
    # Gradients twice: as the optimizer gets them, and as they were before clipping.
    state_bytes = ratio * (2 * profile.gradient_bytes + profile.state_bytes + profile.buffers)
    return parameter_bytes + state_bytes + activations


def choose_reference(
    plan: Plan, job: Job, profile: Profile | None, *, device: torch.device, memory: int, host_memory: int
) -> ReferenceChoice:
    """The strongest reference that fits: `memory` bytes on one device, `host_memory` on the host of a GPU."""
    needed = 0.0 if profile is None else float64_memory(profile)
    if profile is None or needed <= memory:
        return ReferenceChoice()
    needed_text, memory_text = format_units.format_bytes(needed), format_units.format_bytes(memory)
    reason = f"as the model needs {needed_text} in float64 and one device has {memory_text}"
    if device.type == "cuda" and needed <= host_memory:
        return ReferenceChoice(kind="host", reason=reason)
    return ReferenceChoice(kind="plan", plan=_choose_reference_plan(plan, job, profile), reason=reason)


def parse_reference(text: str, plan: Plan, job: Job, profile: Profile | None = None) -> ReferenceChoice:
    """The user's choice: `device`, `host`, or a plan."""
    if text in ("device", "host"):
        return ReferenceChoice(kind=text, reason="as requested" if text == "host" else "")  # type: ignore[arg-type]
    reference_plan = complete(from_text(text), job)
    problem = ""
    if reference_plan.ranks != plan.ranks:
        problem = f"needs {reference_plan.ranks} ranks, and the plan has {plan.ranks}; give one for as many"
    elif not _is_different_plan(plan, reference_plan):
        problem = "a plan compared with itself proves nothing; give another"
    if problem:
        raise VerificationError(f'reference "{reference_plan}": {problem}')
    choice = ReferenceChoice(kind="plan", plan=reference_plan, reason="as requested")
    require_unsplit_batches(choice, plan, profile)
    return choice


def require_unsplit_batches(choice: ReferenceChoice, plan: Plan, profile: Profile | None) -> None:
    """Raise where both plans split batches whose samples may see each other: both would make the same error."""
    if choice.plan is None or profile is None or profile.samples_coupled is False:
        return
    if splits_batch(plan, profile.batch) and splits_batch(choice.plan, profile.batch):
        raise VerificationError(
            f'reference "{choice.plan}": it splits batches as the plan does, and it is unknown whether samples see each other, because '
            f"{profile.coupling_unknown_reason}; give one with whole batches: tp={plan.ranks} or pp={plan.ranks} without micro"
        )


def _is_different_plan(plan: Plan, other: Plan) -> bool:
    return (plan.mesh, plan.zero) != (other.mesh, other.zero)


def _choose_reference_plan(plan: Plan, job: Job, profile: Profile) -> Plan:
    """The simplest other plan that cuts the model: sharded data parallelism, else a tensor axis or stages."""
    refusal = f'the model does not fit on one device, and there is nothing to compare "{plan}" with'
    remedy = 'use a smaller batch or model, or try it all the same with reference="device"'
    if plan.ranks == 1:
        raise VerificationError(f"{refusal}: one rank has no other plan; {remedy}")
    if profile.batch_norms:
        reason = "its samples see each other, so another plan computes something else"
        raise VerificationError(f"{refusal}: {reason}; {remedy}")
    # Where samples may see each other, one of the two has to compute whole batches.
    needs_unsplit = profile.samples_coupled is not False and splits_batch(plan, profile.batch)
    micro = None if needs_unsplit else plan.micro
    reasons = []
    for axis, zero in (("dp", 3), ("tp", 0), ("pp", 0)):
        mesh = Mesh(**{axis: plan.ranks})
        try:
            candidate = Plan(mesh=mesh, zero=zero, threads=plan.threads, micro=micro, recompute=plan.recompute)
            candidate = complete(candidate, job, profile)
            require_executable(candidate, profile)
            require_unsplit_batches(ReferenceChoice(kind="plan", plan=candidate), plan, profile)
        except EchelonError as error:
            reasons.append(str(error))
            continue
        if _is_different_plan(plan, candidate):
            return candidate
    raise VerificationError(f"{refusal}: {'; '.join(reasons)}; {remedy}")
