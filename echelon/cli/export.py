"""`echelon export`: the trained model out of a run, as one file that needs no echelon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.common import DebugOption, JsonOption, print_json
from echelon.plan.format_units import format_bytes


def export(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run's folder (its last checkpoint is taken), or one of its checkpoints."),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT.safetensors", help="The file to write.")],
    best: Annotated[
        bool, typer.Option("--best", help="Of a run: the checkpoint with the lowest evaluation loss, not the last.")
    ] = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write the trained model to one file.

    Parameters and buffers under the model's own names, whatever plan trained them: `model.load_state_dict(load_file(OUT))`.
    """
    from echelon.engine.weights import export_weights

    exported = export_weights(_best_checkpoint(run) if best else run, out)
    if json:
        print_json({
            "out": out, "checkpoint": str(exported.checkpoint), "step": exported.step, "tensors": exported.tensors, "bytes": exported.bytes,
        })  # fmt: skip
    else:
        typer.echo(f"{out}: {exported.tensors} tensors of step {exported.step}, {format_bytes(exported.bytes)}")


def _best_checkpoint(run: str) -> Path:
    from echelon.errors import CheckpointError
    from echelon.flow.run_folder import RunFolder

    best = RunFolder(Path(run), keep=1).best_checkpoint()
    if best is None:
        raise CheckpointError(f"{run}: no checkpoint of it was evaluated; leave out --best to take the last")
    return best[0]
