"""Build the certificate of a proof from the results of its runs, on rank 0."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.plan.certificate import Certificate, Finding
from echelon.verifier.compare import Bounds, summarize_differences
from echelon.verifier.context import Objection, VerificationContext
from echelon.verifier.diagnose_failure import Diagnosis
from echelon.verifier.fingerprints import versions
from echelon.verifier.side_by_side import ProofResult
from echelon.verifier.tolerances import DRIFT_BOUNDS, MIN_FACTOR_DEVIATION


def build_certificate(
    context: VerificationContext, result: ProofResult, diagnosis: Diagnosis | None, nondeterminism: Objection | None, job_hash: str
) -> Certificate:  # fmt: skip
    comparator, drift, choice = result.comparator, result.drift_comparator, context.reference_choice
    assert comparator is not None
    assert drift is not None
    precision = context.plan.precision or context.job.precision
    findings = list(summarize_differences(comparator.differences, context.bounds))
    notes = [*filter(None, [choice.note]), *context.notes, *comparator.notes, *drift.notes]
    remarks: Sequence[str] = ()
    if diagnosis is not None:
        remarks = diagnosis.remarks
        findings = _with_module_outputs(findings, diagnosis.output_finding)
    if comparator.first_divergence is not None and choice.plan is not None:
        remarks = [f'either the plan is wrong or its reference "{choice.plan}" is: this proof cannot tell which']
    if result.skipped_steps:
        notes.append(
            f"in {precision} {result.skipped_steps} of {len(context.steps)} steps were skipped while the loss scale settled; where the first is, "
            "its drift decides nothing"
        )
    divergent = "; ".join(filter(None, [comparator.divergence_text, *remarks]))
    if drift.gradient_factor is not None and not divergent:
        tensors = len({difference.name for difference in drift.differences if difference.kind == "gradient"})
        deviation, where = abs(drift.gradient_factor - 1), f"gradients in {precision} at step {context.steps[0]}"
        bound = MIN_FACTOR_DEVIATION
        finding = Finding(kind="drift", tensors=tensors, max_difference=deviation, where=where, bound=bound)
        findings.append(finding)
        divergent = (
            f"{finding.where}: {drift.gradient_factor:.6g} times the reference, and in float64 they agree: looks like a loss scale, or another "
            f"factor of {precision} alone, that is not taken out"
        )
    if result.loss_state is not None and not divergent:
        findings.append(result.loss_state.finding)
        divergent = result.loss_state.description
    if nondeterminism is not None:
        findings.insert(0, nondeterminism.finding)
        divergent = nondeterminism.description
        notes.append("not deterministic: two runs of one device differ, so nothing is known of the plan")
    drift_bounds = Bounds(default=DRIFT_BOUNDS[precision])
    return Certificate(
        plan=context.plan, job=job_hash, model=context.model_hash, versions=versions(), batch=context.job.batch_size,
        steps=len(context.steps), verified=all(finding.is_within_bound for finding in findings), findings=tuple(findings),
        divergent=divergent, drift=summarize_differences(drift.differences, drift_bounds), notes=tuple(notes),
        deterministic=nondeterminism is None, reference=choice.kind, reference_plan=choice.plan,
    )  # fmt: skip


def _with_module_outputs(findings: list[Finding], output_finding: Finding | None) -> list[Finding]:
    has_outputs = any(finding.kind == "output" for finding in findings)
    if output_finding is None or (output_finding.is_within_bound and has_outputs):
        return findings
    return [output_finding, *(finding for finding in findings if finding.kind != "output")]
