"""Where the truth can be computed: on one device, on the host's CPU, or, where the model fits neither, under another plan.

The last is weaker, and the certificate says so: a mistake that both plans share is not seen.
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
#: How many times that a reference may take, activations and all, before somebody should count.
_SAFETY_FACTOR = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceChoice:
    """What the plan is compared with: one device, the host's CPU, or another `plan`. `reason` is empty for one device."""

    kind: ReferenceKind = "device"
    plan: Plan | None = None
    reason: str = ""

    @property
    def note(self) -> str:
        """What a reader must know of it; empty for one device."""
        if self.kind == "host":
            return f"reference: one process on the host's CPU, {self.reason}"
        if self.kind == "plan":
            return f"reference: {self.plan}, {self.reason}: an error that both plans share is not seen"
        return ""


def free_memory(device: torch.device) -> int:
    """Bytes that are free there now."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


@trial_context()
def fits_easily(job: Job, memory: int) -> bool:
    """Whether the model is so small beside `memory` that nobody need count. Nothing is allocated for it."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return (
            sum(value.numel() for value in build_fake_model(job).parameters()) * _BYTES_PER_PARAMETER * _SAFETY_FACTOR
            <= memory
        )


def float64_memory(profile: Profile) -> float:
    """Bytes of a step of the whole global batch on one device, all in float64."""
    parameter_bytes = 8 * profile.elements
    bytes_ratio = parameter_bytes / max(profile.bytes, 1)
    activations = max(moment.alive.at(profile.batch) for moment in profile.moments)
    activations *= 2 if profile.precision in ("fp32", "tf32") else 4
    # Gradients twice: as the optimizer gets them, and as they were before clipping.
    return (
        parameter_bytes
        + bytes_ratio * (2 * profile.gradient_bytes + profile.state_bytes + profile.buffers)
        + activations
    )


def choose_reference(
    plan: Plan, job: Job, profile: Profile | None, *, device: torch.device, memory: int, host_memory: int
) -> ReferenceChoice:
    """The strongest reference that has the memory: `memory` bytes on one device, `host_memory` beside it where the device is a GPU."""
    if profile is None or float64_memory(profile) <= memory:
        return ReferenceChoice()
    reason = f"as the model needs {format_units.format_bytes(float64_memory(profile))} in float64 and one device has {format_units.format_bytes(memory)}"
    if device.type == "cuda" and float64_memory(profile) <= host_memory:
        return ReferenceChoice(kind="host", reason=reason)
    return ReferenceChoice(kind="plan", plan=_choose_reference_plan(plan, job, profile), reason=reason)


def parse_reference(text: str, plan: Plan, job: Job, profile: Profile | None = None) -> ReferenceChoice:
    """What the user wants it compared with: `device`, `host`, or a plan."""
    if text in ("device", "host"):
        return ReferenceChoice(kind=text, reason="as was asked for" if text == "host" else "")  # type: ignore[arg-type]
    reference_plan = complete(from_text(text), job)
    if reference_plan.ranks != plan.ranks:
        raise VerificationError(
            f'reference "{reference_plan}": it needs {reference_plan.ranks} ranks, and the plan has {plan.ranks}; give one for as many'
        )
    if _is_different_plan(plan, reference_plan):
        choice = ReferenceChoice(kind="plan", plan=reference_plan, reason="as was asked for")
        require_unsplit_batches(choice, plan, profile)
        return choice
    raise VerificationError(
        f'reference "{reference_plan}": a plan that is compared with itself proves nothing; give another'
    )


def require_unsplit_batches(choice: ReferenceChoice, plan: Plan, profile: Profile | None) -> None:
    """Raise where two plans that both part batches are compared, and samples may see each other: both would train the same wrong thing."""
    if choice.plan is None or profile is None or profile.samples_coupled is False:
        return
    if splits_batch(plan, profile.batch) and splits_batch(choice.plan, profile.batch):
        raise VerificationError(
            f'reference "{choice.plan}": it parts batches as the plan does, and it is not known whether samples see each other, because '
            f"{profile.coupling_unknown_reason}; give one that has whole batches: tp={plan.ranks} or pp={plan.ranks} without micro"
        )


def _is_different_plan(plan: Plan, other: Plan) -> bool:
    return (plan.mesh, plan.zero) != (other.mesh, other.zero)


def _choose_reference_plan(plan: Plan, job: Job, profile: Profile) -> Plan:
    """The plan with the least machinery that cuts the model: sharded data parallelism. Beside that very plan, a tensor axis or stages."""
    refusal = f'the model does not fit one device, and there is nothing to compare "{plan}" with'
    remedy = 'take a smaller batch or model, or try it all the same with reference="device"'
    if plan.ranks == 1:
        raise VerificationError(f"{refusal}: one rank has no other plan; {remedy}")
    if profile.batch_norms:
        raise VerificationError(
            f"{refusal}: its samples see each other, so that another plan computes another thing; {remedy}"
        )
    # Where samples may see each other one of the two has to compute batches as a whole.
    needs_unsplit = profile.samples_coupled is not False and splits_batch(plan, profile.batch)
    shared_settings = {
        "threads": plan.threads,
        "micro": None if needs_unsplit else plan.micro,
        "recompute": plan.recompute,
    }
    reasons = []
    for mesh, zero in (({"dp": plan.ranks}, 3), ({"tp": plan.ranks}, 0), ({"pp": plan.ranks}, 0)):
        try:
            reference_plan = complete(Plan(mesh=Mesh(**mesh), zero=zero, **shared_settings), job, profile)  # type: ignore[arg-type]
            require_executable(reference_plan, profile)
            require_unsplit_batches(ReferenceChoice(kind="plan", plan=reference_plan), plan, profile)
        except EchelonError as error:
            reasons.append(str(error))
            continue
        if _is_different_plan(plan, reference_plan):
            return reference_plan
    raise VerificationError(f"{refusal}: {'; '.join(reasons)}; {remedy}")
