"""`echelon server`: start parameter servers by hand, inspect and control running ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from echelon.cli.common import DebugOption, JsonOption, make_table, print_answer, print_warnings
from echelon.cli.server_start import start

app = typer.Typer(help="Start, inspect and control parameter servers.", no_args_is_help=True, rich_markup_mode=None)
app.command()(start)

ControllerOption = Annotated[str, Option("--controller", metavar="HOST:PORT", help="The job's controller.")]
SecretFileOption = Annotated[Path, Option("--secret-file", metavar="FILE", help="The job's secret.")]
TableArgument = Annotated[str, Argument(metavar="TABLE", help="The table's name.")]


@app.command()
def status(
    controller: ControllerOption, secret_file: SecretFileOption, json: JsonOption = False, debug: DebugOption = False
) -> None:
    """Show shards, replicas, lag, staleness, rows, bytes and rates."""
    from echelon.server.protocol.auth import read_secret
    from echelon.server.status import fetch_status, format_server_rows, format_summary

    server_status = fetch_status(controller, read_secret(secret_file))
    table = make_table("server", "heads", "replicas", "rows", "memory", "pushes/s", "rows/s", "lag", "clock")
    for row in format_server_rows(server_status):
        table.add_row(*row)
    print_answer(json, server_status, table, *format_summary(server_status))


@app.command()
def drain(
    server: Annotated[str, Argument(help="The server's name, as `status` shows it.")],
    controller: ControllerOption,
    secret_file: SecretFileOption,
    patience: Annotated[float, Option(help="Seconds to wait until the server is empty.")] = 600.0,
    json: JsonOption = False, debug: DebugOption = False,
) -> None:  # fmt: skip
    """Move all shards off a server during training, so that it can be stopped."""
    from echelon.server.protocol import wire
    from echelon.server.protocol.auth import read_secret
    from echelon.server.status import ADD_SERVER_HINT, fetch_status

    server_status = fetch_status(controller, read_secret(secret_file))
    staying = sum(name != server and not state["leaving"] for name, state in server_status["servers"].items())
    replicas = server_status["replicas"]
    if server in server_status["servers"] and 0 < staying < replicas:
        shortage = f"without {server}, {staying} servers remain for {replicas} replicas of each shard"
        print_warnings([f"{shortage}; {ADD_SERVER_HINT}"])
    answer = _send_request(controller, secret_file, wire.DRAIN, {"server": server}, patience)
    print_answer(json, answer, f"{server} is empty")


@app.command()
def checkpoint(
    path: Annotated[Path, Argument(metavar="FOLDER", help="Where every server can write; replaced if present.")],
    controller: ControllerOption,
    secret_file: SecretFileOption,
    patience: Annotated[float, Option(help="Seconds to wait until it is complete.")] = 3600.0,
    json: JsonOption = False, debug: DebugOption = False,
) -> None:  # fmt: skip
    """Write a checkpoint during training."""
    from echelon.plan.format_units import format_bytes
    from echelon.server.protocol import wire

    answer = _send_request(controller, secret_file, wire.CHECKPOINT, {"path": str(path.resolve())}, patience)
    print_answer(json, answer, f"{path}: {format_bytes(int(answer.get('bytes', 0)))}")


@app.command()
def expire(
    name: TableArgument,
    older: Annotated[int, Argument(min=0, help="Delete rows last written this many log entries ago or earlier.")],
    controller: ControllerOption, secret_file: SecretFileOption, json: JsonOption = False, debug: DebugOption = False,
) -> None:  # fmt: skip
    """Delete rows of a table that have not been updated for long."""
    from echelon.server.protocol import wire

    answer = _send_request(controller, secret_file, wire.EXPIRE, {"table": name, "older": older}, 600.0)
    print_answer(json, answer, f"{name}: deleted the rows older than {older} entries")


@app.command()
def export(
    checkpoint: Annotated[Path, Argument(metavar="FOLDER", help="A checkpoint of servers.")],
    name: TableArgument,
    output: Annotated[Path, Argument(metavar="FILE", help="A .safetensors or .arrow file.")],
    numbers: Annotated[str, Option(help="f4 or f2; i2 or i1 for serving (integers with a scale per row).")] = "f4",
    json: JsonOption = False, debug: DebugOption = False,
) -> None:  # fmt: skip
    """Write a table of a checkpoint to one file. Needs no running server."""
    from echelon.server.store.table_export import export_from_checkpoint

    count = export_from_checkpoint(checkpoint, name, output, numbers)
    print_answer(json, {"table": name, "rows": count, "file": str(output)}, f"{output}: {count} rows of {name}")


def _send_request(controller: str, secret_file: Path, kind: int, meta: dict[str, Any], timeout: float) -> Any:
    from echelon.server.protocol.auth import read_secret
    from echelon.server.status import send_request

    return send_request(controller, read_secret(secret_file), kind, meta, timeout=timeout)
