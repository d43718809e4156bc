"""The parameter server beside TensorFlow's ParameterServerStrategy and a server on torch.rpc, in one run.

    python -m bench.server --json OUT            a 10 M x 64 table, Adagrad, 4096 Zipf ids per batch; a dense pull of 256 MB
    python -m bench.server --growth rows         how ours grows: servers, workers, rows (to 10^8 of 16 dims), staleness

Contenders take turns A B C C B A; each turn starts its processes, fills its table, warms up, is timed, and ends, because two tables
of this size do not always fit into memory. Processor time is that of all processes of a contender (by /proc).
TensorFlow may live elsewhere: --tensorflow PYTHON (or .venv-peers). What is not installed is a row that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.common import Row, among, median, publish, tell

ROOT = Path(__file__).parent.parent
BATCH = 4096
#: Elements of the dense parameter: 256 MB of fp32.
DENSE = 64_000_000
#: Issue 6: CPU per batch with replication on at most this part of TensorFlow's; examples/s at least so many times its; of loopback TCP.
CPU_LIMIT, RATE_LEAST, TCP_LEAST = 1 / 3, 1.5, 0.85
#: TensorFlow's ParameterServerStrategy in both forms, each of which is a verdict of its own: the kindest to it (ids made unique first, 16
#: steps in one call), and as its tutorial has it (a scheduled function per step, ids looked up as they come).
TENSORFLOW = {"TensorFlow, kindest": "tensorflow", "TensorFlow, tutorial": "tensorflow-plain"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Something to time: how to start it, by which name, at which size."""

    name: str
    command: tuple[str, ...]
    #: The module that it needs and how to ask its interpreter for it.
    needs: str | None = None

    def missing(self) -> bool:
        """Whether what it needs is not installed."""
        return self.needs is not None and bool(
            subprocess.run([self.command[0], "-c", f"import {self.needs}"], capture_output=True).returncode
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one turn measured."""

    batches: int
    seconds: float
    cpu: float
    memory: int

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds

    @property
    def cpu_per_batch(self) -> float:
        """Seconds of processor time, of all processes."""
        return self.cpu / self.batches


def family(root: int) -> dict[int, list[str]]:
    """A process and all that descend from it: the fields of its line in /proc, from the third on."""
    lines: dict[int, list[str]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                text = Path(entry.path, "stat").read_text()
                lines[int(entry.name)] = text[text.rindex(")") + 2 :].split()
    found = {root}
    while grown := {pid for pid, fields in lines.items() if int(fields[1]) in found} - found:
        found |= grown
    return {pid: lines[pid] for pid in found if pid in lines}


def spent(root: int) -> tuple[float, int]:
    """Processor seconds and resident bytes of a process and all that descend from it."""
    members = family(root).values()
    ticks = sum(int(fields[11]) + int(fields[12]) for fields in members)
    pages = sum(int(fields[21]) for fields in members)
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


def run(contender: Contender, *, seconds: float, warmup: float) -> Turn:
    """Start a contender, let it warm up, time it, end it and all that it started."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        contender.command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=ROOT,
        env=environment,
        stderr=None if "-v" in sys.argv else subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        while (line := process.stdout.readline().strip()) != "ready":
            if not line and process.poll() is not None:
                raise SystemExit(f"{contender.name}: ended before it was ready; run {' '.join(contender.command)}")
        result: dict[str, float] = {}
        before = (0.0, 0)
        for length in (warmup, seconds):
            before = spent(process.pid)
            process.stdin.write(f"{length}\n")
            process.stdin.flush()
            result = json.loads(process.stdout.readline())
        after = spent(process.pid)
        process.stdin.close()
    finally:
        _end(process)
    return Turn(batches=int(result["batches"]), seconds=result["seconds"], cpu=after[0] - before[0], memory=after[1])


def _end(process: subprocess.Popen[str]) -> None:
    """Let it end by itself, then end what is left of it."""
    rest = family(process.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(15)
    started = {pid: fields[19] for pid, fields in rest.items()}
    for pid, fields in {pid: fields for root in started for pid, fields in family(root).items()}.items():
        if started.get(pid, fields[19]) == fields[19]:  # not a later process of the same number
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def contenders(settings: argparse.Namespace, servers: int, workers: int) -> list[Contender]:
    """Ours with and without a replica (which needs two servers), and the peers."""
    size = (f"--servers={servers}", f"--workers={workers}", f"--rows={settings.rows}", f"--dim={settings.dim}")
    ours = (sys.executable, "-m", "bench.server_ours", "train")
    peers = str(ROOT / "bench" / "server_peers.py")
    found = [Contender(name="echelon", command=(*ours, *size))]
    # One server and a second that is its replica only, or several that are each other's.
    twice = (f"--servers={max(2, servers)}", f"--heads={servers}", *size[1:])
    found.append(Contender(name="echelon, replicated", command=(*ours, *twice, "--replicas=2")))
    for name, word in TENSORFLOW.items():
        if "tensorflow" in settings.peers:
            found.append(Contender(name=name, command=(settings.tensorflow, peers, word, *size), needs="tensorflow"))
    if "torch.rpc" in settings.peers:
        found.append(
            Contender(
                name="torch.rpc", command=(sys.executable, peers, "torch.rpc", *size), needs="torch.distributed.rpc"
            )
        )
    return found


def take_turns(
    those: Sequence[Contender], *, rounds: int, seconds: float, warmup: float
) -> tuple[dict[str, list[Turn]], list[str]]:
    """A B C C B A, `rounds` times half of it. Also who is missing."""
    missing = [each.name for each in those if each.missing()]
    present = [each for each in those if each.name not in missing]
    turns: dict[str, list[Turn]] = {each.name: [] for each in present}
    for number in range(rounds):
        for each in present if number % 2 == 0 else reversed(present):
            turn = run(each, seconds=seconds, warmup=warmup)
            turns[each.name].append(turn)
            print(
                f"  {each.name}: {turn.cpu_per_batch * 1e3:.2f} ms CPU per batch, {turn.rate * BATCH / 1e3:.0f} k examples/s, "
                f"{turn.memory / 2**30:.1f} GiB",
                file=sys.stderr,
                flush=True,
            )
    return turns, missing


def _over(one: Iterable[float], other: Iterable[float]) -> float:
    """The median of the ratios within a round."""
    return float(np.median([a / b for a, b in zip(one, other, strict=True)]))


def compare(settings: argparse.Namespace, servers: int, workers: int) -> list[Row]:
    """One size, all contenders."""
    place = f"{servers} x {workers}"
    turns, missing = take_turns(
        contenders(settings, servers, workers), rounds=settings.rounds, seconds=settings.seconds, warmup=settings.warmup
    )
    rows = [
        tell(Row(what={"servers x workers": place, "what": name, "figure": "not installed"}, value=0.0, text="missing"))
        for name in missing
    ]
    for name, those in turns.items():
        cpu, rate = median([turn.cpu_per_batch * 1e3 for turn in those]), median([turn.rate * BATCH for turn in those])
        detail = {"turns": [[turn.batches, turn.seconds, turn.cpu, turn.memory] for turn in those]}
        what = {"servers x workers": place, "what": name}
        rows.append(
            tell(
                Row(
                    what=what | {"figure": "CPU per batch"},
                    value=cpu.median,
                    text=f"{cpu.median:.2f} ms",
                    detail=detail,
                )
            )
        )
        rows.append(
            tell(Row(what=what | {"figure": "examples/s"}, value=rate.median, text=f"{rate.median / 1e3:.0f} k"))
        )
    for theirs in TENSORFLOW:
        if theirs in turns:
            rows += [tell(row) for row in _against(turns, theirs, place)]
    return rows


def _against(turns: Mapping[str, Sequence[Turn]], peer: str, place: str) -> list[Row]:
    """The ratios that issue 6 sets limits to."""
    theirs = turns[peer]
    rows = []
    for name, limit in (("echelon", None), ("echelon, replicated", CPU_LIMIT)):
        cpu = _over((turn.cpu_per_batch for turn in turns[name]), (turn.cpu_per_batch for turn in theirs))
        rate = _over((turn.rate for turn in turns[name]), (turn.rate for turn in theirs))
        what = {"servers x workers": place, "what": f"{name} / {peer}"}
        rows.append(Row(what=what | {"figure": "CPU per batch"}, value=cpu, text=f"{cpu:.3f}", limit=limit))
        rows.append(Row(what=what | {"figure": "examples/s"}, value=rate, text=f"{rate:.2f}", least=RATE_LEAST))
    return rows


def pull_dense(settings: argparse.Namespace) -> list[Row]:
    """256 MB, ours and raw loopback TCP, in turns."""
    peers = str(ROOT / "bench" / "server_peers.py")
    size = f"--rows={settings.dense}"
    those = [
        Contender(name="echelon", command=(sys.executable, "-m", "bench.server_ours", "dense", size)),
        Contender(name="loopback TCP", command=(sys.executable, peers, "loopback", size)),
    ]
    turns: dict[str, list[Turn]] = {each.name: [] for each in those}
    for number in range(max(4, 2 * settings.rounds)):
        for each in those if number % 2 == 0 else reversed(those):
            turns[each.name].append(run(each, seconds=settings.seconds / 2, warmup=settings.warmup / 2))
    share = _over((turn.rate for turn in turns["echelon"]), (turn.rate for turn in turns["loopback TCP"]))
    what = {"servers x workers": "1 x 1", "what": "dense pull of 256 MB"}
    rows = []
    for name, found in turns.items():
        gib = median([turn.rate * settings.dense * 4 / 2**30 for turn in found]).median
        cpu = median([turn.cpu_per_batch * 1e3 for turn in found]).median
        rows.append(Row(what=what | {"figure": name}, value=gib, text=f"{gib:.2f} GiB/s, {cpu:.0f} ms CPU"))
    rows.append(Row(what=what | {"figure": "of loopback TCP"}, value=share, text=f"{share:.2f}", least=TCP_LEAST))
    return [tell(row) for row in rows]


#: What grows -> the sizes: servers, workers, replicas, rows, dim, staleness.
GROWTH: dict[str, list[dict[str, int | None]]] = {
    "servers": [{"servers": n, "workers": 1, "rows": 1_000_000} for n in (1, 2, 4)],
    "workers": [{"servers": 2, "workers": n, "rows": 1_000_000} for n in (1, 2, 4)],
    "rows": [{"servers": 1, "workers": 1, "rows": 10**n, "dim": 16} for n in (5, 6, 7, 8)],
    "staleness": [{"servers": 2, "workers": 2, "rows": 1_000_000, "staleness": s} for s in (1, 4, 16, None)],
}


def growth(settings: argparse.Namespace, what: str) -> list[Row]:
    """How ours changes with one size."""
    rows = []
    for sizes in GROWTH[what]:
        flags = [f"--{name}={value}" for name, value in sizes.items() if value is not None]
        command = (sys.executable, "-m", "bench.server_ours", "train", *flags)
        turns = [
            run(Contender(name=what, command=command), seconds=settings.seconds, warmup=settings.warmup)
            for _ in range(settings.rounds)
        ]
        rate, cpu = (
            median([turn.rate * BATCH for turn in turns]).median,
            median([turn.cpu_per_batch for turn in turns]).median,
        )
        memory = max(turn.memory for turn in turns) / 2**30
        text = f"{rate / 1e3:.0f} k examples/s, {cpu * 1e3:.2f} ms CPU per batch, {memory:.1f} GiB"
        said = ", ".join(f"{name} {value}" for name, value in sizes.items())
        rows.append(tell(Row(what={"growth": what, "size": said}, value=rate, text=text)))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dense", type=int, default=DENSE, help="elements of the dense pull; 0: leave it out")
    parser.add_argument("--sizes", type=among("1x1", "2x2"), default=["1x1", "2x2"], help="servers x workers")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each contender")
    parser.add_argument("--seconds", type=float, default=8.0, help="timed in each turn")
    parser.add_argument("--warmup", type=float, default=3.0)
    parser.add_argument("--peers", type=among("tensorflow", "torch.rpc", "none"), default=["tensorflow", "torch.rpc"])
    here = ROOT / ".venv-peers" / "bin" / "python"
    parser.add_argument(
        "--tensorflow", default=str(here) if here.exists() else sys.executable, help="a Python that has it"
    )
    parser.add_argument("--growth", type=among(*GROWTH), nargs="?", const=list(GROWTH), help="of ours alone, instead")
    parser.add_argument("-v", action="store_true", help="let contenders write what they complain of")
    settings = parser.parse_args(argv)
    began = time.perf_counter()
    rows: list[Row] = []
    if settings.growth:
        for what in settings.growth:
            rows += growth(settings, what)
    else:
        for size in settings.sizes:
            servers, workers = map(int, size.split("x"))
            rows += compare(settings, servers, workers)
        rows += pull_dense(settings) if settings.dense else []
    notes = [
        f"{settings.rounds} turns of {settings.seconds:g} s each, {os.cpu_count()} cores, {time.perf_counter() - began:.0f} s in all.",
        "echelon, replicated: at 1 x 1 a second server is the replica of the first (heads=1); at 2 x 2 each is the other's; TensorFlow and torch.rpc have none.",
    ]
    return publish("Parameter server", rows, json_path=settings.json, notes=[] if settings.growth else notes)


if __name__ == "__main__":
    sys.exit(main())
