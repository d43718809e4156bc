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
from echelon.plan.check import parts_batches, require
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.plan.text import from_text
from echelon.trials.shape_model import built
from echelon.trials.trial_context import trial_context

#: Bytes of one parameter with its gradient and Adam's two states, in float64.
_TRAINED = 4 * 8
#: How many times that a reference may take, activations and all, before somebody should count.
_AMPLE = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Footing:
    """What the plan is compared with: one device, the host's CPU, or another `plan`. `why` is empty for one device."""

    kind: ReferenceKind = "device"
    plan: Plan | None = None
    why: str = ""

    @property
    def note(self) -> str:
        """What a reader must know of it; empty for one device."""
        if self.kind == "host":
            return f"reference: one process on the host's CPU, {self.why}"
        if self.kind == "plan":
            return f"reference: {self.plan}, {self.why}: an error that both plans share is not seen"
        return ""


def free(device: torch.device) -> int:
    """Bytes that are free there now."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


@trial_context()
def surely_fits(job: Job, memory: int) -> bool:
    """Whether the model is so small beside `memory` that nobody need count. Nothing is allocated for it."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return sum(value.numel() for value in built(job).parameters()) * _TRAINED * _AMPLE <= memory


def needed(profile: Profile) -> float:
    """Bytes of a step of the whole global batch on one device, all in float64."""
    wide = 8 * profile.elements
    scale = wide / max(profile.bytes, 1)
    activations = max(moment.alive.at(profile.batch) for moment in profile.moments)
    activations *= 2 if profile.precision in ("fp32", "tf32") else 4
    # Gradients twice: as the optimizer gets them, and as they were before clipping.
    return wide + scale * (2 * profile.gradient_bytes + profile.state_bytes + profile.buffers) + activations


def choose(plan: Plan, job: Job, profile: Profile | None, *, device: torch.device, memory: int, host: int) -> Footing:
    """The strongest reference that has the memory: `memory` bytes on one device, `host` beside it where the device is a GPU."""
    if profile is None or needed(profile) <= memory:
        return Footing()
    why = f"as the model needs {format_units.size(needed(profile))} in float64 and one device has {format_units.size(memory)}"
    if device.type == "cuda" and needed(profile) <= host:
        return Footing(kind="host", why=why)
    return Footing(kind="plan", plan=_other(plan, job, profile), why=why)


def asked(words: str, plan: Plan, job: Job, profile: Profile | None = None) -> Footing:
    """What the user wants it compared with: `device`, `host`, or a plan."""
    if words in ("device", "host"):
        return Footing(kind=words, why="as was asked for" if words == "host" else "")  # type: ignore[arg-type]
    other = complete(from_text(words), job)
    if other.ranks != plan.ranks:
        raise VerificationError(
            f'reference "{other}": it needs {other.ranks} ranks, and the plan has {plan.ranks}; give one for as many'
        )
    if _differs(plan, other):
        footing = Footing(kind="plan", plan=other, why="as was asked for")
        require_whole(footing, plan, profile)
        return footing
    raise VerificationError(f'reference "{other}": a plan that is compared with itself proves nothing; give another')


def require_whole(footing: Footing, plan: Plan, profile: Profile | None) -> None:
    """Raise where two plans that both part batches are compared, and samples may see each other: both would train the same wrong thing."""
    if footing.plan is None or profile is None or profile.coupled is False:
        return
    if parts_batches(plan, profile.batch) and parts_batches(footing.plan, profile.batch):
        raise VerificationError(
            f'reference "{footing.plan}": it parts batches as the plan does, and it is not known whether samples see each other, because '
            f"{profile.uncompared}; give one that has whole batches: tp={plan.ranks} or pp={plan.ranks} without micro"
        )


def _differs(plan: Plan, other: Plan) -> bool:
    return (plan.mesh, plan.zero) != (other.mesh, other.zero)


def _other(plan: Plan, job: Job, profile: Profile) -> Plan:
    """The plan with the least machinery that cuts the model: sharded data parallelism. Beside that very plan, a tensor axis or stages."""
    refusal = f'the model does not fit one device, and there is nothing to compare "{plan}" with'
    remedy = 'take a smaller batch or model, or try it all the same with reference="device"'
    if plan.ranks == 1:
        raise VerificationError(f"{refusal}: one rank has no other plan; {remedy}")
    if profile.norms:
        raise VerificationError(
            f"{refusal}: its samples see each other, so that another plan computes another thing; {remedy}"
        )
    # Where samples may see each other one of the two has to compute batches as a whole.
    whole = profile.coupled is not False and parts_batches(plan, profile.batch)
    common = {"threads": plan.threads, "micro": None if whole else plan.micro, "recompute": plan.recompute}
    reasons = []
    for mesh, zero in (({"dp": plan.ranks}, 3), ({"tp": plan.ranks}, 0), ({"pp": plan.ranks}, 0)):
        try:
            other = complete(Plan(mesh=Mesh(**mesh), zero=zero, **common), job, profile)  # type: ignore[arg-type]
            require(other, profile)
            require_whole(Footing(kind="plan", plan=other), plan, profile)
        except EchelonError as error:
            reasons.append(str(error))
            continue
        if _differs(plan, other):
            return other
    raise VerificationError(f"{refusal}: {'; '.join(reasons)}; {remedy}")
