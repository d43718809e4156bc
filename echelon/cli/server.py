"""`echelon server`: how running parameter servers are, and what may be asked of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from echelon.cli.common import DebugOption, JsonOption, make_console, make_table, print_json

app = typer.Typer(help="Show and steer running parameter servers.", no_args_is_help=True, rich_markup_mode=None)

ControllerOption = Annotated[str, typer.Option("--controller", metavar="HOST:PORT", help="The job's controller.")]
SecretFileOption = Annotated[Path, typer.Option("--secret-file", metavar="FILE", help="The job's secret.")]


@app.command()
def status(
    controller: ControllerOption, secret_file: SecretFileOption, json: JsonOption = False, debug: DebugOption = False
) -> None:
    """Shards, replicas, lag, staleness, rows, bytes and rates."""
    from echelon.server.protocol.auth import read_secret
    from echelon.server.status import fetch_status, format_server_rows, format_summary

    server_status = fetch_status(controller, read_secret(secret_file))
    if json:
        print_json(server_status)
        return
    status_table = make_table("server", "heads", "replicas", "rows", "memory", "pushes/s", "rows/s", "lag", "clock")
    for row in format_server_rows(server_status):
        status_table.add_row(*row)
    terminal = make_console()
    terminal.print(status_table)
    for line in format_summary(server_status):
        terminal.print(line, soft_wrap=True)


@app.command()
def drain(
    server: Annotated[str, typer.Argument(help="Its name, as `status` shows it.")],
    controller: ControllerOption,
    secret_file: SecretFileOption,
    patience: Annotated[float, typer.Option(help="Seconds to wait until it holds nothing.")] = 600.0,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Move all shards off a server, while training goes on; then it can be stopped."""
    from echelon.server.protocol import wire
    from echelon.server.protocol.auth import read_secret
    from echelon.server.status import ADD_SERVER_HINT, fetch_status

    server_status = fetch_status(controller, read_secret(secret_file))
    staying = sum(name != server and not state["leaving"] for name, state in server_status["servers"].items())
    if server in server_status["servers"] and 0 < staying < server_status["replicas"]:
        typer.echo(
            f"warning: without {server} there are {staying} servers for {server_status['replicas']} replicas of each shard; {ADD_SERVER_HINT}",
            err=True,
        )
    answer = _send_request(controller, secret_file, wire.DRAIN, {"server": server}, patience)
    _print_answer(answer, json, f"{server} holds nothing any more")


@app.command()
def checkpoint(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="A folder that is new, or a checkpoint that it takes the place of, where all servers can write.",
        ),
    ],
    controller: ControllerOption,
    secret_file: SecretFileOption,
    patience: Annotated[float, typer.Option(help="Seconds to wait until it is whole.")] = 3600.0,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a checkpoint, while training goes on."""
    from echelon.plan.format_units import format_bytes
    from echelon.server.protocol import wire

    answer = _send_request(controller, secret_file, wire.CHECKPOINT, {"path": str(path.resolve())}, patience)
    _print_answer(answer, json, f"{path}: {format_bytes(int(answer.get('bytes', 0)))}")


@app.command()
def expire(
    name: Annotated[str, typer.Argument(metavar="TABLE", help="The table.")],
    older: Annotated[int, typer.Argument(min=0, help="Rows that were last written so many log entries ago, or more.")],
    controller: ControllerOption,
    secret_file: SecretFileOption,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Forget rows of a table that nobody pushed to for long."""
    from echelon.server.protocol import wire

    answer = _send_request(controller, secret_file, wire.EXPIRE, {"table": name, "older": older}, 600.0)
    _print_answer(answer, json, f"{name}: rows older than {older} entries are gone")


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint of servers.")],
    name: Annotated[str, typer.Argument(metavar="TABLE", help="The table.")],
    output: Annotated[Path, typer.Argument(metavar="FILE", help="A .safetensors or .arrow file.")],
    numbers: Annotated[
        str, typer.Option(help="f4, f2, or for serving i2 or i1 (integers with a scale per row).")
    ] = "f4",
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a table of a checkpoint for others to read; needs no server."""
    from echelon.server.store.table_export import export_from_checkpoint

    count = export_from_checkpoint(checkpoint, name, output, numbers)
    _print_answer({"table": name, "rows": count, "file": str(output)}, json, f"{output}: {count} rows of {name}")


def _send_request(
    controller: str, secret_file: Path, kind: int, meta: dict[str, Any], timeout: float
) -> dict[str, Any]:
    from echelon.server.protocol.auth import read_secret
    from echelon.server.status import send_request

    return send_request(controller, read_secret(secret_file), kind, meta, timeout=timeout)


def _print_answer(answer: dict[str, Any], json: bool, text: str) -> None:
    if json:
        print_json(answer)
    else:
        typer.echo(text)
