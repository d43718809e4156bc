"""`echelon server start`: the processes that a training starts for itself, started by hand."""

from __future__ import annotations

import contextlib
import math
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from echelon.cli.common import DebugOption, JsonOption, print_answer, print_warnings
from echelon.errors import EchelonError, ServerError

#: Options that every mode takes; then the description of each mode, and its own options.
_COMMON_OPTIONS = {"controller", "servers", "on", "secret_file", "json", "debug"}
_JOB_OPTIONS = {"folder", "replicas", "shards", "staleness", "aggregate", "lease", "restore"}
_MODES = {
    "join": ("one server that joins --controller", {"bind", "advertise", "host", "name", "memory", "spill"}),
    "controller": ("a controller alone (--servers 0)", _JOB_OPTIONS | {"bind", "advertise", "expect"}),
    "ray": ("servers on Ray (--on ray)", _JOB_OPTIONS | {"memory", "spill", "cluster"}),
    "local": ("a controller with servers", _JOB_OPTIONS | {"bind", "advertise", "host", "memory", "spill"}),
}


def start(
    context: typer.Context,
    servers: Annotated[int, Option(min=0, help="Servers to run here; 0: only the controller.")] = 1,
    controller: Annotated[str | None, Option(metavar="HOST:PORT", help="Join this controller [start one].")] = None,
    secret_file: Annotated[Path | None, Option(metavar="FILE", help="The job's secret [FOLDER/secret].")] = None,
    bind: Annotated[str, Option(metavar="HOST[:PORT]", help="Address to listen on.")] = "127.0.0.1",
    advertise: Annotated[str | None, Option(metavar="HOST", help="Name by which others reach this machine.")] = None,
    host: Annotated[str | None, Option(help="Name of this machine; replicas are placed on different ones.")] = None,
    name: Annotated[str | None, Option(help="With --controller: the server's name.")] = None,
    folder: Annotated[Path, Option(help="State and logs; a job found there is resumed.")] = Path("runs/servers"),
    replicas: Annotated[int, Option(min=1, max=3, help="Replicas of each shard.")] = 2,
    shards: Annotated[int, Option(help="Virtual shards, a power of two, fixed for the job.")] = 256,
    expect: Annotated[int | None, Option(min=1, help="With --servers 0: servers to wait for [1].")] = None,
    staleness: Annotated[int | None, Option(min=0, help="Steps that a worker may be ahead [unlimited].")] = None,
    aggregate: Annotated[bool, Option(help="With --staleness 0: sum a step's gradients and apply them once.")] = False,
    lease: Annotated[float, Option(metavar="SECONDS", help="A server silent for so long counts as dead.")] = 0.6,
    memory: Annotated[float | None, Option(metavar="GIB", help="Memory limit of each server.")] = None,
    spill: Annotated[Path | None, Option(metavar="FOLDER", help="Where rows beyond --memory go.")] = None,
    restore: Annotated[Path | None, Option(metavar="FOLDER", help="A server checkpoint to start from.")] = None,
    on: Annotated[str, Option(metavar="local|ray", help="Processes here, or actors on a Ray cluster.")] = "local",
    cluster: Annotated[str | None, Option(metavar="ADDRESS", help="With --on ray [the one Ray finds].")] = None,
    json: JsonOption = False, debug: DebugOption = False,
) -> None:  # fmt: skip
    """Run parameter servers until interrupted."""
    if on not in ("local", "ray"):
        raise EchelonError(f"--on {on}: expected `local` (processes) or `ray` (actors)")
    mode = "join" if controller is not None else "ray" if on == "ray" else "local" if servers else "controller"
    sources = {name: context.get_parameter_source(name) for name in context.params}
    explicit = {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
    _require_options_of(mode, explicit, servers)
    if memory is not None and not 1 <= memory * 2**30 < math.inf:
        raise EchelonError(f"--memory {memory:g}: expected a finite number of GiB above 0; leave it out for no limit")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    bind_host, _, port = bind.rpartition(":") if bind.rpartition(":")[2].isdigit() else (bind, "", "0")
    limits: dict[str, Any] = {"memory": None if memory is None else int(memory * 2**30), "spill": spill}
    if controller is not None:
        names = {"host": host, "advertise": advertise, "name": name}
        _join(controller, secret_file, f"{bind_host}:{port}", limits | names, json)
        return
    job: dict[str, Any] = {"shards": shards, "replicas": replicas, "staleness": staleness, "aggregate": aggregate}
    job = _resume_job_settings(folder, explicit, job)
    if job["aggregate"] and job["staleness"] != 0:
        raise EchelonError("--aggregate sums the gradients of workers that are in step; add --staleness 0")
    secret_file = secret_file or folder / "secret"
    secret = _read_or_create_secret(secret_file)
    shared: dict[str, Any] = {"restore": restore, "lease": lease, "folder": folder, "secret": secret}
    if mode == "controller":
        settings = {key: job.pop(key) for key in ("staleness", "aggregate")}
        shared |= {"settings": settings, "expect": expect or 1, "bind": f"{bind_host}:{port}"}
        _run_controller(secret_file, advertise, job | shared, json)
    elif mode == "ray":
        from echelon.server.on_ray import RayServers

        with RayServers(servers, **job, **shared, **limits, cluster=cluster) as running:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own exits with another status
            _serve(running, secret_file, json)
    else:
        from echelon.server.local_servers import Servers
        from echelon.server.status import ADD_SERVER_HINT

        replicas, hosts = job["replicas"], [host] if host else None
        if servers < replicas:
            shortage = f"--servers {servers}: each shard has {servers} of --replicas {replicas} until others join"
            print_warnings([f"{shortage}; {ADD_SERVER_HINT}"])
        address: dict[str, Any] = {"bind": bind_host, "port": int(port), "advertise": advertise, "hosts": hosts}
        with Servers(servers, **job, **shared, **limits, **address) as running:
            _serve(running, secret_file, json)


def _require_options_of(mode: str, explicit: set[str], servers: int) -> None:
    description, options = _MODES[mode]
    if mode == "ray" and servers == 0:
        raise EchelonError("--servers 0: servers on Ray (--on ray) have their controller on Ray; use 1 or more")
    ignored = explicit - options - _COMMON_OPTIONS | ({"servers"} & explicit if mode == "join" else set())
    if ignored:
        flags = ", ".join(f"--{name}" for name in sorted(ignored))
        hint = ", or add --on ray" if "cluster" in ignored else ""
        raise EchelonError(f"{flags}: not an option of {description}; leave it out{hint}")


def _resume_job_settings(folder: Path, explicit: set[str], options: dict[str, Any]) -> dict[str, Any]:
    """Settings that are fixed for the job: explicit ones (the controller refuses changes), else those of the job in the folder."""
    from echelon.server.controller.state import open_controller
    from echelon.server.controller_process import DOCUMENT_NAME, read_document

    document = read_document(folder / DOCUMENT_NAME)
    if document is None:
        return options
    stored = open_controller(document).job_settings()
    return {name: value if name in explicit else stored.get(name, value) for name, value in options.items()}


def _read_or_create_secret(path: Path) -> bytes:
    from echelon.server.protocol.auth import make_secret, read_secret, write_secret

    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_secret(path, make_secret())
    return read_secret(path)


def _print_controller(json: bool, address: str, secret_file: Path, servers: list[str]) -> None:
    print_answer(
        json,
        {"controller": address, "secret_file": str(secret_file), "servers": servers},
        f"controller at {address}, secret in {secret_file}; interrupt to stop",
        f"echelon server status --controller {address} --secret-file {secret_file}",
    )


def _serve(running: Any, secret_file: Path, json: bool) -> None:
    with contextlib.suppress(KeyboardInterrupt):  # a reader of the address may stop us at once
        _print_controller(json, running.address, secret_file, sorted(running.servers))
        running.serve_forever()


def _join(controller: str, secret_file: Path | None, bind: str, options: dict[str, Any], json: bool) -> None:
    from echelon.server.protocol.auth import read_secret
    from echelon.server.server_process import ServerProcess

    if secret_file is None:
        raise ServerError("--secret-file is missing: joining needs the job's secret; copy the file from the controller")
    process = ServerProcess(secret=read_secret(secret_file), controller=controller, bind=bind, **options)
    text = f"server at {process.address}, for the controller at {controller}; interrupt to stop"
    print_answer(json, {"controller": controller, "address": process.address}, text)
    with contextlib.suppress(KeyboardInterrupt):
        process.run()


def _run_controller(secret_file: Path, advertise: str | None, options: dict[str, Any], json: bool) -> None:
    from echelon.server.controller_process import ControllerProcess
    from echelon.server.protocol.connection import parse_address

    process = ControllerProcess(**options)
    address = f"{advertise}:{parse_address(process.address)[1]}" if advertise else process.address
    with contextlib.suppress(KeyboardInterrupt):
        _print_controller(json, address, secret_file, [])
        process.run()
