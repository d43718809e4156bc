"""`echelon export`: the trained model out of a run, as one file that needs no echelon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.common import Debug, Json, print_json
from echelon.plan.format_units import size


def export(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run's folder (its last checkpoint is taken), or one of its checkpoints."),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT.safetensors", help="The file to write.")],
    best: Annotated[
        bool, typer.Option("--best", help="Of a run: the checkpoint with the lowest evaluation loss, not the last.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the trained model to one file.

    Parameters and buffers under the model's own names, whatever plan trained them: `model.load_state_dict(load_file(OUT))`.
    """
    from echelon.engine.weights import export_weights

    done = export_weights(_best(run) if best else run, out)
    if json:
        print_json({
            "out": out, "checkpoint": str(done.checkpoint), "step": done.step, "tensors": done.tensors, "bytes": done.bytes,
        })  # fmt: skip
    else:
        typer.echo(f"{out}: {done.tensors} tensors of step {done.step}, {size(done.bytes)}")


def _best(run: str) -> Path:
    from echelon.errors import CheckpointError
    from echelon.flow.run_folder import RunFolder

    found = RunFolder(Path(run), keep=1).best()
    if found is None:
        raise CheckpointError(f"{run}: no checkpoint of it was evaluated; leave out --best to take the last")
    return found[0]
