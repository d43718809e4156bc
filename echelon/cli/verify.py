"""`echelon verify`: the proof that a plan computes what one device computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.common import Debug, File, Json, PlanOption, console, table, warn

if TYPE_CHECKING:
    from echelon.plan.certificate import Certificate


def verify(
    file: File,
    plan: PlanOption = "auto",
    steps: Annotated[int, typer.Option(min=1, help="Training steps to compare.")] = 2,
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", help="Where the certificate goes.")
    ] = "certificate.json",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Prove that a plan computes the right thing.

    Loss, every gradient and every parameter after some steps, in float64, against one device. Exit 1 when they differ; the
    first divergent tensor is named.
    """
    from echelon.world import read_world

    certificate = _prove(file, plan, steps, out, debug)
    if read_world().main:  # the ranks that torchrun started all come here
        if json:
            typer.echo(certificate.to_json())
        else:
            _show(certificate, out)
    raise typer.Exit(0 if certificate.verified else 1)


def _prove(file: str, wanted: str, steps: int, out: str, debug: bool) -> Certificate:
    """The certificate, made in this process or by ranks that it starts."""
    from echelon.flow.prepare import Subject, prepare
    from echelon.flow.start import run_ranks
    from echelon.flow.verify import verify as verify_here
    from echelon.plan.certificate import Certificate
    from echelon.world import read_world

    if read_world().launched:
        return verify_here(file, wanted, steps=steps, out=out)
    subject = Subject(file)
    prepared = prepare(subject, wanted)
    warn(subject.warnings)
    if prepared.plan.ranks == 1:
        return verify_here(file, prepared.plan, steps=steps, out=out)
    code = run_ranks("verify", file, prepared, {"steps": steps, "out": out}, debug=debug)
    if code:
        raise typer.Exit(code)
    return Certificate.load(out)


def _show(certificate: Certificate, path: str) -> None:
    rows = table("compared", "worst at", "tensors", "largest difference", "allowed", left=2)
    for finding in certificate.findings:
        rows.add_row(
            finding.kind, finding.where, str(finding.tensors), f"{finding.worst:.1e}", f"{finding.bound:.0e}",
            style=None if finding.good else "bold",
        )  # fmt: skip
    screen = console()
    screen.print(rows)
    for note in certificate.notes:
        screen.print(f"note: {note}")
    if certificate.verified:
        screen.print(f'verified: "{certificate.plan}" computes what one device computes; certificate in {path}')
    else:
        screen.print(
            f'NOT verified: "{certificate.plan}" departs from one device, first at {certificate.divergent}; see {path}'
        )
