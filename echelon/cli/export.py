"""`echelon export`: the trained model of a run as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from echelon.cli.common import DebugOption, JsonOption, print_answer
from echelon.plan.format_units import format_bytes


def export(
    run: Annotated[str, Argument(metavar="RUN", help="A run folder (its last checkpoint), or a checkpoint.")],
    out: Annotated[str, Argument(metavar="OUT.safetensors", help="The file to write.")],
    best: Annotated[bool, Option("--best", help="Take the run's checkpoint with the lowest evaluation loss.")] = False,
    json: JsonOption = False, debug: DebugOption = False,
) -> None:  # fmt: skip
    """Write the trained model to one file.

    The file holds parameters and buffers under the model's own names, whatever plan trained them, and loads without echelon:
    `model.load_state_dict(load_file(OUT))`.
    """
    from echelon.engine.weights import export_weights

    exported = export_weights(_best_checkpoint(run) if best else run, out)
    answer = {"out": out, "checkpoint": str(exported.checkpoint), "step": exported.step}
    answer |= {"tensors": exported.tensors, "bytes": exported.bytes}
    text = f"{out}: {exported.tensors} tensors of step {exported.step}, {format_bytes(exported.bytes)}"
    print_answer(json, answer, text)


def _best_checkpoint(run: str) -> Path:
    from echelon.errors import CheckpointError
    from echelon.flow.run_folder import RunFolder

    best = RunFolder(Path(run), keep=1).best_checkpoint()
    if best is None:
        raise CheckpointError(f"{run}: no checkpoint was evaluated; leave out --best to export the last one")
    return best[0]
