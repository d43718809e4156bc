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
from echelon.server.protocol.event_loop import parse_address

START_TIMEOUT = 120.0
#: Seconds of compiling before it is said; about how long it takes on an idle core.
_COMPILE_NOTICE_DELAY, _TYPICAL_COMPILE_SECONDS = 2.0, 40
#: Seconds until something that ended is started again, the first time and at most: what ends at once shall not fill the disk with logs.
MIN_RESTART_DELAY, MAX_RESTART_DELAY = 0.5, 30.0


def _print_line(line: str) -> None:
    sys.stderr.write(f"echelon servers: {line}\n")
    sys.stderr.flush()


class ChildProcess:
    """A process of ours and what it said."""

    def __init__(self, config: Mapping[str, Any], log: Path) -> None:
        # The child runs the same echelon, wherever this process found it.
        package_root = str(Path(__file__).parents[2])
        command = f"import sys; sys.path.insert(0, {package_root!r}); from echelon.server.process_main import main; sys.exit(main())"
        self.log = log
        self._log_offset = log.stat().st_size if log.exists() else 0
        with open(log, "ab") as log_file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                start_new_session=True,
            )
        assert self.process.stdin is not None
        # The secret goes by the pipe: arguments and environments can be read by others.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(config).encode() + b"\n")
            self.process.stdin.flush()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    def wait_for_address(self) -> str:
        """Where it listens; waits until it does."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise LaunchError(self.describe_end())
        return str(json.loads(line)["address"])

    def describe_end(self) -> str:
        """Why it ended, in words: what it refused if it did, else the end of its log."""
        text = ""
        with contextlib.suppress(OSError):
            text = self.log.read_text(errors="replace")[-4000:].strip()
        with contextlib.suppress(ValueError, AttributeError):
            last_event = json.loads(text.rpartition("\n")[2])
            if self.process.returncode == 1 and last_event.get("event") == "failed":
                return str(last_event["why"])
        exit_code = self.process.poll()
        outcome = (
            "runs"
            if exit_code is None
            else f"was killed by signal {-exit_code}"
            if exit_code < 0
            else f"ended with {exit_code}"
        )
        return f"it {outcome}; its log, {self.log}, ends with: {text[-2000:] or 'nothing'}"

    def read_compile_progress(self) -> float | None:
        """The share of its loops that is compiled, where it said so since the last call."""
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

    def stop(self, timeout: float = 2.0) -> None:
        """End it: its input ends, and if that does not do it, it is killed."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _CompileNotice:
    """Tells a person, once it takes long, that and how far the loops are compiled."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._reported_share = -1.0

    def report(self, share: float) -> None:
        if time.monotonic() - self._started_at < _COMPILE_NOTICE_DELAY:
            return
        if self._reported_share < 0:
            _print_line(
                f"compiling the server's loops, once (about {_TYPICAL_COMPILE_SECONDS} s, longer on a busy machine)"
            )
            self._reported_share = 0.0
        if share >= self._reported_share + 0.25:
            self._reported_share = share
            _print_line(f"compiling the server's loops: {share:.0%}")


def check_server_options(n: int, replicas: int, *, staleness: int | None, aggregate: bool, memory: int | None) -> None:
    """Whether servers can be started so."""
    if n < 1 or not 1 <= replicas <= 3:
        raise ServerError(f"{n} servers with {replicas} replicas; use at least one server, and 1, 2 or 3 replicas")
    if staleness is not None and staleness < 0:
        raise ServerError(
            f"staleness={staleness}; give the steps that a worker may be ahead, 0 or more, or None for no bound"
        )
    if aggregate and staleness != 0:
        raise ServerError(
            f"aggregate=True with staleness={staleness}; gradients are added up over workers in step, use staleness=0"
        )
    if memory is not None and memory < 1 << 20:
        raise ServerError(f"memory={memory}; it is in bytes, and no server holds rows in less than {1 << 20}")


class Servers:
    """`n` servers and a controller, started here; they end with this process, or with `close`.

    `staleness`: None never waits, s lets no worker read more than s steps ahead of the slowest; `aggregate`: with 0, gradients of a step
    are added up over workers and applied once. `folder` keeps the controller's file and the logs, and a job that is there
    already goes on (with the same settings: others are refused); `restore`: a checkpoint to begin from.
    `heads`: how many of the servers take pushes and reads at most, the others being replicas only (None: all take their share). A batch
    costs a frame per head: `Servers(2, replicas=2, heads=1)` is one server and its replica, at less processor time than two of each.
    `lease`: seconds without a sign of life after which a server is taken for dead; more where processes may be starved of time.
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
        check_server_options(n, replicas, staleness=staleness, aggregate=aggregate, memory=memory)
        if heads is not None and heads < 1:
            raise ServerError(f"heads={heads}; at least one server takes pushes, use 1 or more, or None for all")
        self.secret = secret or make_secret()
        self._owns_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="echelon-servers-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._replicas = replicas
        self._bind_host, self._memory, self._spill, self._hosts = bind, memory, spill, hosts
        settings = {"staleness": staleness, "aggregate": aggregate} | ({"heads": heads} if heads else {})
        self._config = {
            "role": "controller",
            "secret": self.secret.hex(),
            "folder": str(self.folder),
            "shards": shards,
            "replicas": replicas,
            "expect": n,
            "settings": settings,
            "lease": lease,
            "restore": None if restore is None else str(Path(restore).resolve()),
        }
        self.servers: dict[str, ChildProcess] = {}
        self._start_count = 0
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._servers_to_replace = 0
        self._supervisor: threading.Thread | None = None
        #: Per kind of child, when it may be started again, and how long to wait if it ends at once.
        self._restart_times: dict[str, tuple[float, float]] = {}
        self._advertise = advertise
        self.controller = ChildProcess({**self._config, "bind": f"{bind}:{port}"}, self.folder / "controller.log")
        try:
            self._listen_address = self.controller.wait_for_address()
            #: What others call: bound to all interfaces it listens at no address that they could.
            self.address = (
                f"{advertise}:{parse_address(self._listen_address)[1]}" if advertise else self._listen_address
            )
            for _ in range(n):
                self.start()
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def start(self) -> str:
        """One more server; it joins by itself. Its name."""
        self._start_count += 1
        name = f"s{self._start_count}"
        host = self._hosts[(self._start_count - 1) % len(self._hosts)] if self._hosts else None
        config = {
            "role": "server",
            "secret": self.secret.hex(),
            "controller": self.address,
            "bind": f"{self._bind_host}:0",
            "advertise": self._advertise,
            "name": name,
            "host": host,
            "memory": self._memory,
            "spill": None if self._spill is None else str(self._spill / name),
        }
        self.servers[name] = ChildProcess(config, self.folder / f"{name}.log")
        return name

    def restart_controller(self) -> None:
        """A new life of the controller, at the same address, from its file (after it was killed)."""
        self.controller.stop(0.0)
        self.controller = ChildProcess(
            {**self._config, "bind": self._listen_address, "is_restart": True}, self.folder / "controller.log"
        )
        if self.controller.wait_for_address() != self._listen_address:
            raise LaunchError(f"the controller came back at another address than {self.address}")

    def restart_dead(self, report: Callable[[str], None] = _print_line) -> None:
        """Start again what ended since the last call, and say so: the controller from its file, a server as a new one that gets its shards.

        A server that was asked to end (SIGTERM, after a drain) is not replaced while there are as many others as replicas.
        """
        with self._lock:
            if self._closing.is_set():
                return
            for name, child in list(self.servers.items()):
                exit_code = child.process.poll()
                if exit_code is None:
                    continue
                reason = child.describe_end()
                child.stop()
                del self.servers[name]
                has_enough = len(self.servers) >= self._replicas
                if exit_code in (0, -signal.SIGTERM) and has_enough:
                    report(f"server {name} was ended; {len(self.servers)} are left")
                    continue
                self._servers_to_replace += 1
                consequence = (
                    "its shards go back to the last checkpoint, or are lost where there is none"
                    if self._replicas == 1
                    else "the other replicas go on"
                )
                report(f"server {name} died ({reason}); {consequence}, and a new server takes its place")
            if self._servers_to_replace and self._may_restart("server"):
                self._servers_to_replace -= 1
                report(f"server {self.start()} started")
            if self.controller.process.poll() is not None and self._may_restart("controller"):
                report(
                    f"the controller died ({self.controller.describe_end()}); servers and workers go on, it is started again"
                )
                try:
                    self.restart_controller()
                except LaunchError as error:
                    report(f"the controller cannot be started again, and is tried again: {error}")
                else:
                    report(f"the controller is back at {self.address}, from its file in {self.folder}")

    def _may_restart(self, kind: str) -> bool:
        """Whether it is time to start one again; each time within a minute doubles the wait for the next."""
        now = time.monotonic()
        next_start, delay = self._restart_times.get(kind, (now, MIN_RESTART_DELAY))
        if now < next_start:
            return False
        self._restart_times[kind] = (
            now + delay,
            min(2 * delay, MAX_RESTART_DELAY) if now < next_start + 60.0 else MIN_RESTART_DELAY,
        )
        return True

    def serve_forever(self) -> None:
        """Tend them until `close`, or for ever; for who has nothing else to do."""
        while not self._closing.wait(0.2):
            self.restart_dead()

    def serve_in_background(self) -> Servers:
        """Tend them from a thread."""
        self._supervisor = threading.Thread(target=self.serve_forever, name="echelon-servers", daemon=True)
        self._supervisor.start()
        return self

    def wait_until_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Until every server is in the map and every shard has a head. Compiling does not count, while it goes on."""
        from echelon.server.status import fetch_status

        last_progress, notice = time.monotonic(), _CompileNotice()
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
                notice.report(max(shares))
            if time.monotonic() > last_progress + timeout:
                raise LaunchError(f"servers did not come up within {timeout:g} s: {self._describe_missing(status)}")
            time.sleep(0.02)

    def _describe_missing(self, status: Mapping[str, Any]) -> str:
        """What is waited for, in words."""
        if not status:
            return f"the controller at {self.address} does not answer: {self.controller.describe_end()}"
        missing = [name for name in self.servers if name not in status["servers"]]
        if not missing:
            return "all have joined, and some shards have no server yet; the machine may be too busy, use fewer servers"
        return (
            f"{', '.join(missing)} of {len(self.servers)} did not join the controller at {self.address}; {missing[0]}: "
            f"{self.servers[missing[0]].describe_end()}; where the machine is too busy for them use fewer servers"
        )

    def close(self) -> None:
        """End all of them."""
        self._closing.set()
        with self._lock:
            self._close()

    def _close(self) -> None:
        for child in (*self.servers.values(), self.controller):
            for pipe in (child.process.stdin, child.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        for child in (*self.servers.values(), self.controller):
            child.stop()
        if self._owns_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
