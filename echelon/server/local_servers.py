"""Servers as plain processes of this machine: the default, with nothing to install or configure."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echelon.errors import LaunchError, ServerError
from echelon.server.controller.state import SERVER_LEASE
from echelon.server.log import COMPILING_EVENT
from echelon.server.protocol.auth import make_secret
from echelon.server.protocol.connection import parse_address

START_TIMEOUT = 120.0
#: Seconds of compilation before its progress is printed.
_COMPILE_NOTICE_DELAY = 2.0
#: Seconds before a process that ended is restarted, at first and at most: one that ends at once must not fill the disk with logs.
MIN_RESTART_DELAY, MAX_RESTART_DELAY = 0.5, 30.0


def _print_line(line: str) -> None:
    sys.stderr.write(f"echelon servers: {line}\n")
    sys.stderr.flush()


class ChildProcess:
    """A server or controller process, and its log."""

    def __init__(self, config: Mapping[str, Any], log: Path) -> None:
        # The child runs the same echelon, wherever this process found it.
        package_root = str(Path(__file__).parents[2])
        command = f"import sys; sys.path.insert(0, {package_root!r}); from echelon.server.process_main import main; sys.exit(main())"
        self.log = log
        self._log_offset = log.stat().st_size if log.exists() else 0
        with open(log, "ab") as log_file:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log_file}
            self.process = subprocess.Popen([sys.executable, "-c", command], start_new_session=True, **pipes)
        assert self.process.stdin is not None
        # The secret goes through the pipe: other users can read arguments and environments.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(config).encode() + b"\n")
            self.process.stdin.flush()

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_for_address(self) -> str:
        """The address on which it listens, once it does."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise LaunchError(self.describe_end())
        return str(json.loads(line)["address"])

    def describe_end(self) -> str:
        """Why it ended: the error that it logged, else its exit code and the end of its log."""
        text = ""
        with contextlib.suppress(OSError):
            text = self.log.read_text(errors="replace")[-4000:].strip()
        with contextlib.suppress(ValueError, AttributeError):
            last_event = json.loads(text.rpartition("\n")[2])
            if self.process.returncode == 1 and last_event.get("event") == "failed":
                return str(last_event["why"])
        exit_code = self.process.poll()
        outcome = "is running" if exit_code is None else f"ended with {exit_code}"
        if exit_code is not None and exit_code < 0:
            outcome = f"was killed by signal {-exit_code}"
        return f"it {outcome}; its log, {self.log}, ends with: {text[-2000:] or 'nothing'}"

    def read_compile_progress(self) -> float | None:
        """The share of its kernels that is compiled, if it logged one since the last call."""
        share = None
        with contextlib.suppress(OSError), open(self.log, "rb") as log:
            log.seek(self._log_offset)
            *lines, partial_line = log.read().split(b"\n")
            self._log_offset = log.tell() - len(partial_line)
            for line in lines:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    event = json.loads(line)
                    share = float(event["share"]) if event["event"] == COMPILING_EVENT else share
        return share

    def close_pipes(self) -> None:
        """End the process's input, at which it ends."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def stop(self, timeout: float = 2.0) -> None:
        self.close_pipes()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def controller_config(
    n: int,
    *,
    folder: Path | None,
    replicas: int,
    shards: int,
    staleness: int | None,
    aggregate: bool,
    lease: float,
    memory: int | None,
    restore: Path | str | None,
    heads: int | None = None,
) -> dict[str, Any]:
    """The configuration of a controller of `n` servers. Creates the folder, a temporary one if it is None."""
    if n < 1 or not 1 <= replicas <= 3:
        raise ServerError(f"{n} servers with {replicas} replicas; use at least one server, and 1, 2 or 3 replicas")
    if staleness is not None and staleness < 0:
        raise ServerError(f"staleness={staleness}; use the steps that a worker may be ahead, or None for any")
    if aggregate and staleness != 0:
        raise ServerError(f"aggregate=True needs workers in step; use staleness=0 instead of {staleness}")
    if memory is not None and memory < 1 << 20:
        raise ServerError(f"memory={memory}; it is in bytes, and a server needs at least {1 << 20}")
    if heads is not None and heads < 1:
        raise ServerError(f"heads={heads}; at least one server takes pushes, use 1 or more, or None for all")
    folder = folder or Path(tempfile.mkdtemp(prefix="echelon-servers-"))
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "folder": str(folder.resolve()),
        "shards": shards,
        "replicas": replicas,
        "expect": n,
        "settings": {"staleness": staleness, "aggregate": aggregate} | ({"heads": heads} if heads else {}),
        "lease": lease,
        "restore": None if restore is None else str(Path(restore).resolve()),
    }


class Servers:
    """`n` servers and a controller, which end with this process or `close`.

    `staleness`: None never waits; s lets no worker read more than s steps ahead of the slowest. `aggregate`, with 0: the gradients of a step
    are summed over workers and applied once. `folder` holds the controller's document and the logs; a job that it holds already continues,
    with the same settings. `restore`: a checkpoint to start from. `heads`: how many servers take pushes and reads, the others being replicas
    only (None: all). A batch costs a frame per head: `Servers(2, replicas=2, heads=1)` is one server and its replica, and takes less CPU than
    two of each. `lease`: seconds of silence after which a server is declared dead; raise it if processes may be starved of CPU.
    """

    def __init__(
        self,
        n: int = 1,
        *,
        replicas: int = 2,
        heads: int | None = None,
        shards: int = 256,
        staleness: int | None = None,
        aggregate: bool = False,
        lease: float = SERVER_LEASE,
        memory: int | None = None,
        spill: Path | None = None,
        restore: Path | str | None = None,
        folder: Path | None = None,
        secret: bytes | None = None,
        bind: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        hosts: list[str] | None = None,
    ) -> None:
        self.secret = secret or make_secret()
        self._config = {"role": "controller", "secret": self.secret.hex()} | controller_config(
            n, folder=folder, replicas=replicas, shards=shards, staleness=staleness, aggregate=aggregate, lease=lease,
            memory=memory, restore=restore, heads=heads,
        )  # fmt: skip
        self.folder, self._owns_folder = Path(self._config["folder"]), folder is None
        self._replicas, self._memory, self._spill = replicas, memory, spill
        self._bind_host, self._advertise, self._hosts = bind, advertise, hosts
        self.servers: dict[str, ChildProcess] = {}
        self._start_count = 0
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._servers_to_replace = 0
        #: Per kind of child, when it may be restarted, and how long to wait if it ends at once.
        self._restart_times: dict[str, tuple[float, float]] = {}
        self.controller = ChildProcess({**self._config, "bind": f"{bind}:{port}"}, self.folder / "controller.log")
        try:
            self._listen_address = self.controller.wait_for_address()
            #: Where others connect: one that is bound to all interfaces has no address that they could use.
            port = parse_address(self._listen_address)[1]
            self.address = f"{advertise}:{port}" if advertise else self._listen_address
            for _ in range(n):
                self.start()
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def start(self) -> str:
        """Start one more server, which joins by itself; its name."""
        self._start_count += 1
        name = f"s{self._start_count}"
        host = self._hosts[(self._start_count - 1) % len(self._hosts)] if self._hosts else None
        config = {
            "role": "server", "name": name, "secret": self.secret.hex(), "controller": self.address, "host": host,
            "bind": f"{self._bind_host}:0", "advertise": self._advertise, "memory": self._memory,
            "spill": None if self._spill is None else str(self._spill / name),
        }  # fmt: skip
        self.servers[name] = ChildProcess(config, self.folder / f"{name}.log")
        return name

    def restart_controller(self) -> None:
        """Restart the controller from its document, at the same address."""
        self.controller.stop(0.0)
        config = {**self._config, "bind": self._listen_address, "is_restart": True}
        self.controller = ChildProcess(config, self.folder / "controller.log")
        if self.controller.wait_for_address() != self._listen_address:
            raise LaunchError(f"the controller came back at another address than {self.address}")

    def restart_dead(self, report: Callable[[str], None] = _print_line) -> None:
        """Replace processes that ended since the last call, and report them: the controller from its document, a server by a new one.

        A server that was ended on purpose (SIGTERM, after a drain) is not replaced while there are as many others as replicas.
        """
        with self._lock:
            if self._closing.is_set():
                return
            for name, child in list(self.servers.items()):
                if (exit_code := child.process.poll()) is None:
                    continue
                reason = child.describe_end()
                self.servers.pop(name).stop()
                if exit_code in (0, -signal.SIGTERM) and len(self.servers) >= self._replicas:
                    report(f"server {name} was ended; {len(self.servers)} are left")
                    continue
                self._servers_to_replace += 1
                consequence = "the other replicas continue"
                if self._replicas == 1:
                    consequence = "its shards go back to the last checkpoint, or are lost without one"
                report(f"server {name} died ({reason}); {consequence}, and a new server replaces it")
            if self._servers_to_replace and self._may_restart("server"):
                self._servers_to_replace -= 1
                report(f"server {self.start()} started")
            if self.controller.process.poll() is not None and self._may_restart("controller"):
                reason = self.controller.describe_end()
                report(f"the controller died ({reason}); servers and workers continue while it restarts")
                try:
                    self.restart_controller()
                    report(f"the controller is back at {self.address}, from its document in {self.folder}")
                except LaunchError as error:
                    report(f"the controller could not be restarted, and will be tried again: {error}")

    def _may_restart(self, kind: str) -> bool:
        """Whether to restart now; each restart within a minute doubles the delay of the next."""
        now = time.monotonic()
        next_start, delay = self._restart_times.get(kind, (now, MIN_RESTART_DELAY))
        if now < next_start:
            return False
        next_delay = min(2 * delay, MAX_RESTART_DELAY) if now < next_start + 60.0 else MIN_RESTART_DELAY
        self._restart_times[kind] = (now + delay, next_delay)
        return True

    def serve_forever(self) -> None:
        """Replace processes that end, until `close`."""
        while not self._closing.wait(0.2):
            self.restart_dead()

    def serve_in_background(self) -> Servers:
        """Replace them from a thread."""
        threading.Thread(target=self.serve_forever, name="echelon-servers", daemon=True).start()
        return self

    def wait_until_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until every server is in the map and every shard has a head. The timeout starts over while servers compile."""
        from echelon.server.status import fetch_status

        started_at = last_progress = time.monotonic()
        printed_share = -1.0
        while True:
            status: dict[str, Any] = {}
            with contextlib.suppress(ServerError, OSError):
                status = fetch_status(self.address, self.secret)
            if status and set(self.servers) <= set(status["servers"]) and not status["unplaced"]:
                return
            for name, child in {"the controller": self.controller, **self.servers}.items():
                if child.process.poll() is not None:
                    raise LaunchError(f"{name}: {child.describe_end()}")
            shares = [share for child in self.servers.values() if (share := child.read_compile_progress()) is not None]
            if shares:
                last_progress = time.monotonic()
                if max(shares) >= printed_share + 0.25 and last_progress > started_at + _COMPILE_NOTICE_DELAY:
                    printed_share = max(shares)
                    _print_line(f"compiling the kernels, once (about 40 s on an idle machine): {printed_share:.0%}")
            if time.monotonic() > last_progress + timeout:
                raise LaunchError(f"servers did not come up within {timeout:g} s: {self._describe_missing(status)}")
            time.sleep(0.02)

    def _describe_missing(self, status: Mapping[str, Any]) -> str:
        if not status:
            return f"the controller at {self.address} does not answer: {self.controller.describe_end()}"
        problem = "all have joined, but some shards have no server yet"
        if missing := [name for name in self.servers if name not in status["servers"]]:
            problem = f"{', '.join(missing)} of {len(self.servers)} did not join the controller at {self.address}; {missing[0]}: "
            problem += self.servers[missing[0]].describe_end()
        return f"{problem}; if the machine is too busy, use fewer servers"

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            children = (*self.servers.values(), self.controller)
            for child in children:
                child.close_pipes()
            for child in children:
                child.stop()
            if self._owns_folder:
                shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
