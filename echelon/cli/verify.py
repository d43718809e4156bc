"""`echelon verify`: prove that a plan computes what one device computes."""

from __future__ import annotations

from json import loads
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from echelon.cli.common import DebugOption, JobFile, JsonOption, make_table, print_answer, print_warnings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from echelon.flow.resolve_plan import ResolvedPlan
    from echelon.plan.certificate import Certificate, Finding


def verify(
    file: JobFile,
    plan: Annotated[str, Option(metavar="P", help='As "dp=2 zero=1", a plan file, or auto.')] = "auto",
    steps: Annotated[int, Option(min=1, help="Training steps to compare.")] = 2,
    out: Annotated[str, Option("--out", "-o", metavar="FILE", help="The certificate to write.")] = "certificate.json",
    reference: Annotated[
        str, Option(metavar="auto|device|host|PLAN", help="What to compare with; auto: the strongest that fits.")
    ] = "auto",
    memory: Annotated[float | None, Option(metavar="GB", min=0.0, help="Memory of one device [what is free].")] = None,
    json: JsonOption = False, debug: DebugOption = False,
) -> None:  # fmt: skip
    """Prove that a plan computes the right thing.

    Compares the loss, every gradient and every parameter after some steps with one device, in float64. Exit 1 if they differ, naming the
    first divergent tensor.
    """
    from echelon.world import read_world

    memory_bytes = None if memory is None else int(memory * 1e9)
    options = {"steps": steps, "out": out, "reference": reference, "memory": memory_bytes}
    certificate = _prove_plan(file, plan, options, debug)
    if read_world().is_main:  # every rank that torchrun started comes here
        print_answer(json, loads(certificate.to_json()), *_describe_certificate(certificate, out))
    raise typer.Exit(0 if certificate.verified else 1)


def _prove_plan(file: str, requested: str, options: dict[str, Any], debug: bool) -> Certificate:
    from echelon.flow.job_source import JobSource
    from echelon.flow.spawn import run_ranks
    from echelon.flow.verify import verify_job
    from echelon.world import read_world

    job_source = JobSource(file)

    def start_ranks(resolved: ResolvedPlan) -> str:
        print_warnings(job_source.warnings)
        return run_ranks("verify", file, resolved, options, debug=debug)

    certificate = verify_job(job_source, requested, read_world(), **options, start_ranks=start_ranks)
    print_warnings(job_source.warnings if certificate.plan.ranks == 1 else ())
    return certificate


def _finding_table(title: str, findings: Sequence[Finding]) -> Table:
    table = make_table(title, "worst at", "tensors", "largest difference", "allowed", text_columns=2)
    for finding in findings:
        table.add_row(
            finding.kind, finding.where, str(finding.tensors), f"{finding.max_difference:.1e}", f"{finding.bound:.0e}",
            style=None if finding.is_within_bound else "bold",
        )  # fmt: skip
    return table


def _describe_certificate(certificate: Certificate, path: str) -> list[str | Table]:
    plan, reference = certificate.plan, certificate.reference_description
    if certificate.verified:
        weakness = f" (weaker: {certificate.limitation})" if certificate.limitation else ""
        verdict = f'verified: "{plan}" computes what {reference} computes{weakness}; certificate in {path}'
    elif not certificate.deterministic:
        verdict = f"NOT verified: {certificate.divergent}; see {path}"
    else:
        verdict = f'NOT verified: "{plan}" departs from {reference}, first at {certificate.divergent}; see {path}'
    return [
        _finding_table("compared", certificate.findings),
        "",
        _finding_table("drift in its own precision", certificate.drift),
        *(f"note: {note}" for note in certificate.notes),
        verdict,
    ]
