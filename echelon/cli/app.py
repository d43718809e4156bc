"""The `echelon` command: its verbs and its error handling.

Exit codes: 0 success, 1 the answer is no (does not fit, does not verify, training failed), 2 wrong use, 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from echelon.cli import cache, data, doctor, explain, export, pack, plan, report, server, simulate, train, verify
from echelon.cli.common import wants_traceback
from echelon.errors import EchelonError
from echelon.launchers.environment import fix_hash_seed, keep_freed_memory
from echelon.launchers.rank_ipc import format_error


class CommandGroup(TyperGroup):
    """The verbs. An error becomes one message and an exit code; --debug shows the traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None
        except Exception as error:
            if wants_traceback(ctx) or isinstance(error, (typer.Exit, typer.Abort)) or hasattr(error, "show"):
                raise  # the last: usage errors of the command line, which print themselves
            typer.echo(f"error: {format_error(error)}", err=True)
            raise typer.Exit(error.exit_code if isinstance(error, EchelonError) else 1) from None


app = typer.Typer(
    cls=CommandGroup,
    help="Train any PyTorch model in parallel: plan it for your devices, prove the plan, train it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help in plain text: drawing it with rich takes longer than everything else
)
for verb in (doctor, plan, explain, simulate, verify, train, pack, report, export):
    app.command()(getattr(verb, verb.__name__.rpartition(".")[2]))
for group in (data, cache, server):
    app.add_typer(group.app, name=group.__name__.rpartition(".")[2])


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve() -> None:
    """Moved."""
    raise EchelonError("`echelon serve` is now `echelon server start`, with the same options")


def main() -> None:
    """The entry point of `echelon` and `python -m echelon`."""
    keep_freed_memory()
    if {"train", "verify"} & set(sys.argv[1:2]):
        fix_hash_seed()
    # A launcher or torchrun shows its own command; ours is always called the same.
    app(prog_name="echelon", args=sys.argv[1:])
