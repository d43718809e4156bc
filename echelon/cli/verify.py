"""`echelon verify`: the proof that a plan computes what one device computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.common import Debug, File, Json, PlanOption, console, table, warn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from echelon.plan.certificate import Certificate, Finding


def verify(
    file: File,
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
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Prove that a plan computes the right thing.

    Loss, every gradient and every parameter after some steps, in float64, against one device. Exit 1 when they differ; the
    first divergent tensor is named.
    """
    from echelon.world import read_world

    options: dict[str, Any] = {"steps": steps, "out": out, "reference": reference}
    options["memory"] = None if memory is None else int(memory * 1e9)
    certificate = _prove(file, plan, options, debug)
    if read_world().main:  # the ranks that torchrun started all come here
        if json:
            typer.echo(certificate.to_json())
        else:
            _show(certificate, out)
    raise typer.Exit(0 if certificate.verified else 1)


def _prove(file: str, wanted: str, options: dict[str, Any], debug: bool) -> Certificate:
    """The certificate, made in this process or by ranks that it starts."""
    from echelon.flow.resolve_plan import Subject, prepare
    from echelon.flow.spawn import run_ranks
    from echelon.flow.verify import verify as verify_here
    from echelon.plan.certificate import Certificate
    from echelon.world import read_world

    if read_world().launched:
        return verify_here(file, wanted, **options)
    subject = Subject(file)
    prepared = prepare(subject, wanted)
    warn(subject.warnings)
    if prepared.plan.ranks == 1:
        return verify_here(file, prepared.plan, **options)
    code = run_ranks("verify", file, prepared, options, debug=debug)
    if code:
        raise typer.Exit(code)
    return Certificate.load(options["out"])


def _table(what: str, findings: Sequence[Finding]) -> Table:
    rows = table(what, "worst at", "tensors", "largest difference", "allowed", left=2)
    for finding in findings:
        rows.add_row(
            finding.kind, finding.where, str(finding.tensors), f"{finding.worst:.1e}", f"{finding.bound:.0e}",
            style=None if finding.good else "bold",
        )  # fmt: skip
    return rows


def _show(certificate: Certificate, path: str) -> None:
    screen = console()
    screen.print(_table("compared", certificate.findings))
    screen.print("")
    screen.print(_table("drift in its own precision", certificate.drift))
    for note in certificate.notes:
        screen.print(f"note: {note}")
    against = certificate.against
    if certificate.verified:
        weaker = f" (weaker: {certificate.weakness})" if certificate.weakness else ""
        screen.print(f'verified: "{certificate.plan}" computes what {against} computes{weaker}; certificate in {path}')
    elif not certificate.deterministic:
        screen.print(f"NOT verified: {certificate.divergent}; see {path}")
    else:
        screen.print(
            f'NOT verified: "{certificate.plan}" departs from {against}, first at {certificate.divergent}; see {path}'
        )
