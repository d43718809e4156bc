"""The `echelon` command: its verbs, and how an error ends one.

Exit codes: 0 good, 1 the answer is no (does not fit, does not verify, a training that failed), 2 wrong use, 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from echelon.cli import cache, data, doctor, explain, export, pack, plan, report, serve, server, simulate, train, verify
from echelon.cli.common import wants_traceback
from echelon.errors import EchelonError
from echelon.launchers.environment import fix_hash_seed
from echelon.launchers.rank_ipc import format_error


class CommandGroup(TyperGroup):
    """The verbs. An error becomes one message and an exit code; the traceback is for --debug."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except EchelonError as error:
            if wants_traceback(ctx):
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None
        except Exception as error:
            if wants_traceback(ctx) or isinstance(error, (typer.Exit, typer.Abort)) or hasattr(error, "show"):
                raise  # the last: the command line's own usage errors, which show themselves
            typer.echo(f"error: {format_error(error)}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=CommandGroup,
    help="Trains any PyTorch model in parallel: plans it for the devices there are, proves the plan, trains it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help in plain text: drawing it with rich takes longer than everything else
)
for command_module in (doctor, plan, explain, simulate, verify, train, pack, report, export, serve):
    app.command()(getattr(command_module, command_module.__name__.rpartition(".")[2]))
app.add_typer(data.app, name="data")
app.add_typer(cache.app, name="cache")
app.add_typer(server.app, name="server")


def main() -> None:
    """The entry point of `echelon` and `python -m echelon`."""
    if {"train", "verify"} & set(sys.argv[1:2]):
        fix_hash_seed()
    # A launcher or torchrun shows its own command; ours is always called the same.
    app(prog_name="echelon", args=sys.argv[1:])
