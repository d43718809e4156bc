"""`echelon verify`: the proof that a plan computes what one device computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.common import DebugOption, JobFile, JsonOption, PlanOption, make_console, make_table, print_warnings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from echelon.flow.resolve_plan import ResolvedPlan
    from echelon.plan.certificate import Certificate, Finding


def verify(
    file: JobFile,
    plan: PlanOption = "auto",
    steps: Annotated[int, typer.Option(min=1, help="Training steps to compare.")] = 2,
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", help="Where the certificate goes.")
    ] = "certificate.json",
    reference: Annotated[
        str,
        typer.Option(
            metavar="auto|device|host|PLAN",
            help="What to compare with; auto: one device if it has the memory, else the strongest there is.",
        ),
    ] = "auto",
    memory: Annotated[
        float | None, typer.Option(metavar="GB", min=0.0, help="Memory of one device (default: what is free).")
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Prove that a plan computes the right thing.

    Loss, every gradient and every parameter after some steps, in float64, against one device. Exit 1 when they differ; the
    first divergent tensor is named.
    """
    from echelon.world import read_world

    options = {
        "steps": steps,
        "out": out,
        "reference": reference,
        "memory": None if memory is None else int(memory * 1e9),
    }
    certificate = _prove_plan(file, plan, options, debug)
    if read_world().is_main:  # ranks that torchrun started all come here
        if json:
            typer.echo(certificate.to_json())
        else:
            _print_certificate(certificate, out)
    raise typer.Exit(0 if certificate.verified else 1)


def _prove_plan(file: str, requested: str, options: dict[str, Any], debug: bool) -> Certificate:
    """The certificate, made in this process or by ranks that it starts."""
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
    result = make_table(title, "worst at", "tensors", "largest difference", "allowed", text_columns=2)
    for finding in findings:
        result.add_row(
            finding.kind, finding.where, str(finding.tensors), f"{finding.max_difference:.1e}", f"{finding.bound:.0e}",
            style=None if finding.is_within_bound else "bold",
        )  # fmt: skip
    return result


def _print_certificate(certificate: Certificate, path: str) -> None:
    terminal = make_console()
    terminal.print(_finding_table("compared", certificate.findings))
    terminal.print("")
    terminal.print(_finding_table("drift in its own precision", certificate.drift))
    for note in certificate.notes:
        terminal.print(f"note: {note}")
    reference_name = certificate.reference_description
    if certificate.verified:
        weakness_note = f" (weaker: {certificate.limitation})" if certificate.limitation else ""
        terminal.print(
            f'verified: "{certificate.plan}" computes what {reference_name} computes{weakness_note}; certificate in {path}'
        )
    elif not certificate.deterministic:
        terminal.print(f"NOT verified: {certificate.divergent}; see {path}")
    else:
        terminal.print(
            f'NOT verified: "{certificate.plan}" departs from {reference_name}, first at {certificate.divergent}; see {path}'
        )
