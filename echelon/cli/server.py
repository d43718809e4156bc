"""`echelon server`: how running parameter servers are, and what may be asked of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from echelon.cli.common import Debug, Json, console, print_json, table

app = typer.Typer(help="Show and steer running parameter servers.", no_args_is_help=True, rich_markup_mode=None)

Controller = Annotated[str, typer.Option("--controller", metavar="HOST:PORT", help="The job's controller.")]
SecretFile = Annotated[Path, typer.Option("--secret-file", metavar="FILE", help="The job's secret.")]


@app.command()
def status(controller: Controller, secret_file: SecretFile, json: Json = False, debug: Debug = False) -> None:
    """Shards, replicas, lag, staleness, rows, bytes and rates."""
    from echelon.server.protocol.auth import read_secret
    from echelon.server.status import ask, in_words, rows

    found = ask(controller, read_secret(secret_file))
    if json:
        print_json(found)
        return
    shown = table("server", "heads", "replicas", "rows", "memory", "pushes/s", "rows/s", "lag", "clock")
    for row in rows(found):
        shown.add_row(*row)
    screen = console()
    screen.print(shown)
    for line in in_words(found):
        screen.print(line, soft_wrap=True)


@app.command()
def drain(
    server: Annotated[str, typer.Argument(help="Its name, as `status` shows it.")],
    controller: Controller,
    secret_file: SecretFile,
    patience: Annotated[float, typer.Option(help="Seconds to wait until it holds nothing.")] = 600.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Move all shards off a server, while training goes on; then it can be stopped."""
    from echelon.server.protocol import wire
    from echelon.server.protocol.auth import read_secret
    from echelon.server.status import MORE, ask

    found = ask(controller, read_secret(secret_file))
    staying = sum(name != server and not each["leaving"] for name, each in found["servers"].items())
    if server in found["servers"] and 0 < staying < found["replicas"]:
        typer.echo(
            f"warning: without {server} there are {staying} servers for {found['replicas']} replicas of each shard; {MORE}",
            err=True,
        )
    answer = _ask(controller, secret_file, wire.DRAIN, {"server": server}, patience)
    _answer(answer, json, f"{server} holds nothing any more")


@app.command()
def checkpoint(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="A folder that is new, or a checkpoint that it takes the place of, where all servers can write.",
        ),
    ],
    controller: Controller,
    secret_file: SecretFile,
    patience: Annotated[float, typer.Option(help="Seconds to wait until it is whole.")] = 3600.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint, while training goes on."""
    from echelon.plan.format_units import size
    from echelon.server.protocol import wire

    answer = _ask(controller, secret_file, wire.CHECKPOINT, {"path": str(path.resolve())}, patience)
    _answer(answer, json, f"{path}: {size(int(answer.get('bytes', 0)))}")


@app.command()
def expire(
    name: Annotated[str, typer.Argument(metavar="TABLE", help="The table.")],
    older: Annotated[int, typer.Argument(min=0, help="Rows that were last written so many log entries ago, or more.")],
    controller: Controller,
    secret_file: SecretFile,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Forget rows of a table that nobody pushed to for long."""
    from echelon.server.protocol import wire

    answer = _ask(controller, secret_file, wire.EXPIRE, {"table": name, "older": older}, 600.0)
    _answer(answer, json, f"{name}: rows older than {older} entries are gone")


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint of servers.")],
    name: Annotated[str, typer.Argument(metavar="TABLE", help="The table.")],
    output: Annotated[Path, typer.Argument(metavar="FILE", help="A .safetensors or .arrow file.")],
    numbers: Annotated[
        str, typer.Option(help="f4, f2, or for serving i2 or i1 (integers with a scale per row).")
    ] = "f4",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a table of a checkpoint for others to read; needs no server."""
    from echelon.server.store.table_export import from_checkpoint

    count = from_checkpoint(checkpoint, name, output, numbers)
    _answer({"table": name, "rows": count, "file": str(output)}, json, f"{output}: {count} rows of {name}")


def _ask(controller: str, secret_file: Path, kind: int, meta: dict[str, Any], patience: float) -> dict[str, Any]:
    from echelon.server.protocol.auth import read_secret
    from echelon.server.status import request

    return request(controller, read_secret(secret_file), kind, meta, patience=patience)


def _answer(answer: dict[str, Any], json: bool, words: str) -> None:
    if json:
        print_json(answer)
    else:
        typer.echo(words)
