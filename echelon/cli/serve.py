"""`echelon serve`: parameter servers by hand; the same processes that a training starts for itself."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from echelon.cli.common import DebugOption, JsonOption, print_json
from echelon.errors import EchelonError, ServerError


def serve(
    context: typer.Context,
    servers: Annotated[int, typer.Option(min=0, help="How many servers to run here; 0: the controller alone.")] = 1,
    controller: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Join this controller with one server; else start one here.")
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The job's secret (mode 600); made with a new controller where there is none."
        ),
    ] = None,
    bind: Annotated[
        str, typer.Option(metavar="HOST[:PORT]", help="Where to listen; beyond this machine only if you say so.")
    ] = "127.0.0.1",
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST", help="The name that others call this machine by.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="What tells this machine from others (replicas go to different ones).")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The server's name.")] = None,
    folder: Annotated[
        Path, typer.Option(help="Where the controller's file and the logs are; a controller goes on from there.")
    ] = Path("runs/servers"),
    replicas: Annotated[int, typer.Option(min=1, max=3, help="Replicas of each shard.")] = 2,
    shards: Annotated[int, typer.Option(help="Virtual shards, a power of two, for the job's life.")] = 256,
    expect: Annotated[int | None, typer.Option(min=1, help="Servers to wait for before shards are placed.")] = None,
    staleness: Annotated[
        int | None, typer.Option(min=0, help="Steps that a worker may be ahead; else it never waits.")
    ] = None,
    aggregate: Annotated[
        bool, typer.Option(help="With staleness 0: add up a step's gradients and apply them once.")
    ] = False,
    lease: Annotated[
        float, typer.Option(metavar="SECONDS", help="Without a sign of life for so long a server is taken for dead.")
    ] = 0.6,
    memory: Annotated[float | None, typer.Option(metavar="GIB", help="Bound of each server's memory.")] = None,
    spill: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where rows beyond memory go.")] = None,
    restore: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A checkpoint of servers to begin from.")
    ] = None,
    on: Annotated[
        str, typer.Option(metavar="local|ray", help="Processes of this machine, or actors over a Ray cluster's nodes.")
    ] = "local",
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="With --on ray: the cluster; else the one that Ray finds.")
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run parameter servers until interrupted."""
    given_options = {option for option in context.params if _is_given(context, option)}
    _check_options(on, cluster, servers, controller, given_options)
    if memory is not None and not 1 <= memory * 2**30 < math.inf:
        raise EchelonError(f"--memory {memory:g}: a bound is a number of GiB above 0; leave it out for none")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    bind_host, _, port = bind.rpartition(":") if bind.rpartition(":")[2].isdigit() else (bind, "", "0")
    memory_limit = None if memory is None else int(memory * 2**30)
    if controller is not None:
        secret = _read_or_make_secret(secret_file, make=False)
        options: dict[str, Any] = {
            "memory": memory_limit,
            "spill": spill,
            "host": host,
            "advertise": advertise,
            "name": name,
        }
        _run_server(controller, secret, f"{bind_host}:{port}", options, json)
        return
    job_settings = _job_settings(
        folder, given_options, {"shards": shards, "replicas": replicas, "staleness": staleness, "aggregate": aggregate}
    )
    if job_settings["aggregate"] and job_settings["staleness"] != 0:
        raise EchelonError("--aggregate: gradients are added up over workers that are in step; add --staleness 0")
    secret_file = secret_file or folder / "secret"
    if servers == 0:
        settings = {name: job_settings.pop(name) for name in ("staleness", "aggregate")}
        _run_controller(
            secret_file,
            folder,
            f"{bind_host}:{port}",
            advertise,
            {**job_settings, "restore": restore, "expect": expect or 1, "settings": settings, "lease": lease},
            json,
        )
        return
    secret = _read_or_make_secret(secret_file, make=True)
    if on == "ray":
        from echelon.server.on_ray import RayServers

        with RayServers(
            servers, **job_settings, restore=restore, lease=lease, memory=memory_limit, spill=spill, folder=folder, secret=secret,
            cluster=cluster,
        ) as ray_servers:  # fmt: skip
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own would leave with another status
            with contextlib.suppress(KeyboardInterrupt):  # whoever reads the address may end us at once
                _print_controller(json, ray_servers.address, secret_file, {"servers": sorted(ray_servers.servers)})
                ray_servers.serve_forever()
        return
    from echelon.server.local_servers import Servers

    if servers < job_settings["replicas"]:
        from echelon.server.status import ADD_SERVER_HINT

        typer.echo(
            f"--servers {servers}: each shard has {servers} of --replicas {job_settings['replicas']} until others join; {ADD_SERVER_HINT}",
            err=True,
        )
    with Servers(
        servers, **job_settings, restore=restore, lease=lease, memory=memory_limit, spill=spill, folder=folder, secret=secret,
        bind=bind_host, port=int(port), advertise=advertise, hosts=[host] if host else None,
    ) as local_servers, contextlib.suppress(KeyboardInterrupt):  # fmt: skip
        _print_controller(json, local_servers.address, secret_file, {"servers": sorted(local_servers.servers)})
        local_servers.serve_forever()


#: What nodes and their addresses decide under Ray, and what is the controller's.
_PLACEMENT_OPTIONS = ("controller", "advertise", "host", "name", "expect", "bind")
_CONTROLLER_OPTIONS = (
    "servers", "folder", "replicas", "shards", "expect", "staleness", "aggregate", "lease", "restore",
)  # fmt: skip


def _check_options(on: str, cluster: str | None, servers: int, controller: str | None, given_options: set[str]) -> None:
    def flags(names: Sequence[str]) -> str:
        return ", ".join(f"--{name}" for name in names if name in given_options)

    if on not in ("local", "ray"):
        raise EchelonError(f"--on {on}: servers run as `local` processes or on `ray`")
    if on == "local" and cluster is not None:
        raise EchelonError(f"--cluster {cluster}: that is the address of a Ray cluster; add --on ray")
    if on == "ray" and (flags(_PLACEMENT_OPTIONS) or servers < 1):
        refused = flags(_PLACEMENT_OPTIONS) or "--servers 0"
        raise EchelonError(f"{refused}: with --on ray the nodes and their addresses are Ray's to tell; leave it out")
    if controller is not None and flags(_CONTROLLER_OPTIONS):
        raise EchelonError(
            f"{flags(_CONTROLLER_OPTIONS)}: one server joins the controller at {controller}, which was started with its own; leave it out"
        )


def _is_given(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def _job_settings(folder: Path, given_options: set[str], options: dict[str, Any]) -> dict[str, Any]:
    """What a job is for life: as was given (which a controller refuses where its job is another), else as the job in that folder is."""
    from echelon.server import atomic_file
    from echelon.server.controller.state import open_controller

    document = atomic_file.read_json(folder / "controller.json")
    if document is None:
        return options
    stored = open_controller(document).job_settings()
    return {name: value if name in given_options else stored.get(name, value) for name, value in options.items()}


def _read_or_make_secret(path: Path | None, *, make: bool) -> bytes:
    from echelon.server.protocol.auth import make_secret, read_secret, write_secret

    if path is None:
        raise ServerError(
            "--secret-file: the job's secret is needed to join; copy the file from where the controller runs"
        )
    if make and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_secret(path, make_secret())
    return read_secret(path)


def _print_controller(json: bool, address: str, secret: Path, extra: dict[str, Any]) -> None:
    if json:
        print_json({"controller": address, "secret_file": str(secret), **extra})
        return
    typer.echo(f"controller at {address}, secret in {secret}; interrupt to end")
    typer.echo(f"echelon server status --controller {address} --secret-file {secret}")


def _run_server(controller: str, secret: bytes, bind: str, options: dict[str, Any], json: bool) -> None:
    from echelon.server.server_process import ServerProcess

    process = ServerProcess(secret=secret, controller=controller, bind=bind, **options)
    if json:
        print_json({"controller": controller, "address": process.address})
    else:
        typer.echo(f"server at {process.address}, for the controller at {controller}; interrupt to end")
    _run_until_interrupted(process)


def _run_controller(
    secret_file: Path, folder: Path, bind: str, advertise: str | None, options: dict[str, Any], json: bool
) -> None:
    from echelon.server.controller_process import ControllerProcess
    from echelon.server.protocol.event_loop import parse_address

    process = ControllerProcess(
        secret=_read_or_make_secret(secret_file, make=True), folder=folder, bind=bind, **options
    )
    address = f"{advertise}:{parse_address(process.address)[1]}" if advertise else process.address
    with contextlib.suppress(KeyboardInterrupt):
        _print_controller(json, address, secret_file, {"servers": []})
        process.run()


def _run_until_interrupted(process: Any) -> None:
    try:
        process.run()
    except KeyboardInterrupt:
        return
