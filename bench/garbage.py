"""Mutated frames at the listeners of running servers: python -m bench.garbage [--frames 100000] [--seed 0] [--json OUT]

Half of them from strangers (no proof, a damaged one, one of another secret, each followed by a sound push and a sound pull), half from holders
of the secret, a quarter of these by memory that they share with the server. Nothing may crash or hang; strangers may neither read nor write a row, nor get a byte beyond the listener's own greeting.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import secrets as tokens
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from echelon.errors import ServerError
from echelon.server import Rule, Servers, Table, connect
from echelon.server.local_servers import ChildProcess
from echelon.server.protocol import shared_memory, wire
from echelon.server.protocol.auth import ADMIN, SERVER, WORKER, CallerHandshake, authenticate
from echelon.server.protocol.connection import parse_address
from echelon.server.status import fetch_status

IDS = np.arange(64)
REPLY = 72
#: Connections at once, and seconds that a loaded machine may take for one.
TOGETHER = 64
PATIENCE = 30.0


class Unsafe(Exception):  # noqa: N818 (a verdict)
    """What must not happen, happened."""


def sound(shards: int) -> list[bytes]:
    """Frames as workers, heads and administrators send them."""
    cover = np.arange(shards, dtype=np.uint16)
    worker = {"version": 1 << 40, "worker": "0", "incarnation": 1 << 40, "step": 0}
    push = worker | {"seq": 1, "tick": True, "ops": [{"table": "canary"}], "lr": None}
    pull = worker | {"bound": None, "ops": [{"table": "canary", "wire": "f4"}]}
    grads = np.ones((len(IDS), 4), np.float32)
    made = [
        wire.encode(wire.PUSH, 1, push | {"version": 0}, [cover, IDS, grads]),
        wire.encode(wire.PULL, 2, pull | {"version": 0}, [cover, IDS]),
        wire.encode(
            wire.CHANGED,
            3,
            worker | {"table": "canary", "wire": "f4", "limit": 10},
            [cover, np.zeros(shards, np.int64)],
        ),
        wire.encode(wire.CLOCK, 4, worker, [cover]),
        wire.encode(wire.DIGEST, 5, worker, [cover]),
        wire.encode(wire.JOIN, 6, {"role": "worker", "id": "x", "incarnation": None, "address": "", "host": "h"}),
        wire.encode(wire.WATCH, 7, {"after": 0}),
        wire.encode(wire.STATUS, 8, {}),
        wire.encode(wire.DECLARE, 9, {"spec": {"what": "table", "name": "other", "dim": 4}}),
        wire.encode(wire.HEARTBEAT, 10, {"server": "s1", "incarnation": 1}),
        wire.encode(wire.HELLO, 11, {"head": "s9", "incarnation": 99, "member": 1, "v": 1, "link": 1}),
        wire.encode(wire.LOG_ENTRY, 12, {"n": 1, "v": 1}, [np.zeros(64, np.uint8)]),
        wire.encode(wire.CAUGHT_UP, 13, {"shard": 0, "learner": "s1", "incarnation": 1, "version": 1}),
    ]
    return [b"".join(each) for each in made]


def mutated(frame: bytes, drawn: random.Random) -> bytes:
    """A frame with some of it changed: bits, whole numbers, its length, its text."""
    bad = bytearray(frame)
    for _ in range(drawn.randint(1, 6)):
        way = drawn.random()
        at = drawn.randrange(len(bad)) if drawn.random() < 0.5 else drawn.randrange(min(len(bad), 160))
        if way < 0.5:
            bad[at] ^= 1 << drawn.randrange(8)
        elif way < 0.7:
            bad[at : at + 8] = drawn.choice([b"\xff" * 8, bytes(8), drawn.randbytes(8)])
        elif way < 0.8:
            del bad[at : at + drawn.randint(1, 64)]
        elif way < 0.9:
            bad[at:at] = drawn.randbytes(drawn.randint(1, 64))
        else:
            bad = bad[: at + 1]
        if not bad:
            bad = bytearray(b"\0")
    return bytes(bad)


def unproved(frames: list[bytes], drawn: random.Random) -> bytes:
    """What one sends who does not hold the secret, in one of several ways; then sound frames and garbage."""
    caller = CallerHandshake(tokens.token_bytes(32), drawn.choice([WORKER, SERVER, ADMIN]))
    way = drawn.random()
    front = b""
    if way < 0.4:
        front = mutated(caller.hello, drawn)
    elif way < 0.7:
        front = caller.hello + drawn.randbytes(32)
    return front + drawn.choice(frames[:2]) + mutated(drawn.choice(frames), drawn)


def at_once(lines: list[tuple[socket.socket, bytes]]) -> list[int]:
    """Send on many connections, then read each to its end: how many bytes came."""
    for connection, data in lines:
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
    counts = []
    for connection, _ in lines:
        got = 0
        try:
            while part := connection.recv(1 << 16):
                got += len(part)
        except TimeoutError:
            raise Unsafe(f"a listener neither answered nor hung up within {PATIENCE:g} s") from None
        except OSError:
            pass
        counts.append(got)
    return counts


def strangers(targets: list[str], frames: list[bytes], drawn: random.Random, count: int) -> None:
    """Many who do not hold the secret."""
    with contextlib.ExitStack() as stack:
        lines = []
        for _ in range(count):
            connection = socket.create_connection(parse_address(drawn.choice(targets)), timeout=PATIENCE)
            lines.append((stack.enter_context(connection), unproved(frames, drawn)))
        for got in at_once(lines):
            if got not in (0, REPLY):
                raise Unsafe(f"a stranger got {got} bytes")


def holders(targets: list[str], secret: bytes, frames: list[bytes], drawn: random.Random, count: int) -> None:
    """Many who hold it, and send one frame of garbage each (a connection ends with the first that is none)."""
    with contextlib.ExitStack() as stack:
        lines = []
        for _ in range(count):
            address = parse_address(drawn.choice(targets))
            connection = stack.enter_context(socket.create_connection(address, timeout=PATIENCE))
            authenticate(connection, secret, drawn.choice([WORKER, WORKER, ADMIN]), timeout=PATIENCE)
            connection.settimeout(PATIENCE)
            data = mutated(drawn.choice(frames), drawn)
            made = shared_memory.make_offer(connection) if drawn.random() < 0.25 else None
            if made is not None:
                stack.callback(made.close)
                data = lent(made, data, drawn)
            lines.append((connection, data))
        at_once(lines)


def lent(made: shared_memory.SharedMemoryOffer, data: bytes, drawn: random.Random) -> bytes:
    """Garbage in memory, or an announcement or an offer that is garbage."""
    offered = b"".join(made.frame)
    data += (
        bytes(max(0, shared_memory.MIN_FRAME_BYTES - len(data)))
        if drawn.random() < 0.5
        else drawn.randbytes(shared_memory.MIN_FRAME_BYTES)
    )
    note = b"".join(shared_memory.SharedMemoryChannel(made.area, is_creator=True).publish([data]) or [])
    what = drawn.randrange(3)
    return (mutated(offered, drawn) if what == 0 else offered) + (mutated(note, drawn) if what == 1 else note)


def running(servers: Servers) -> dict[str, ChildProcess]:
    """The processes that live, by name."""
    every = {"controller": servers.controller, **servers.servers}
    return {name: child for name, child in every.items() if child.process.poll() is None}


def attack(servers: Servers, frames: int, seed: int, *, say: Any = lambda text: None) -> dict[str, Any]:
    """All of it; what was seen: how many of the processes that are attacked ended of it, too. Raises Unsafe."""
    # These and no others: one that ends may have been replaced by the time that they are counted.
    attacked, began, reached = running(servers), time.monotonic(), {"strangers": 0, "holders": 0}
    crashed = lambda: sum(child.process.poll() is not None for child in attacked.values())  # noqa: E731
    try:
        tell = lambda text: say(f"{text}, {time.monotonic() - began:.0f} s")  # noqa: E731
        _attack(servers, frames, random.Random(seed), reached, crashed, tell)
    except (OSError, ServerError):
        # Nobody answers any more: because a process ended, which the kernel may say a moment later, or for a reason of its own.
        time.sleep(0.5)
        if not crashed():
            raise
    seconds = round(time.monotonic() - began, 1)
    return {"frames": frames, "seed": seed, **reached, "seconds": seconds, "crashes": crashed()}


def _attack(
    servers: Servers, frames: int, drawn: random.Random, reached: dict[str, int], crashed: Callable[[], int], say: Any
) -> None:
    """Until all is sent or somebody ended."""
    with connect(servers.address, secret=servers.secret, worker="witness") as client:
        client.declare(Table(name="canary", dim=4, rule=Rule(kind="sgd", lr=1.0)))
        client.push({"canary": (IDS, np.ones((len(IDS), 4), np.float32))})
        client.flush()
        before = client.pull({"canary": IDS})["canary"]
        found = fetch_status(servers.address, servers.secret)
        targets = [servers.address, *(each["address"] for each in found["servers"].values())]
        good = sound(found["shards"])
        half = frames // 2
        while (sent := reached["strangers"]) < half:
            strangers(targets, good, drawn, min(TOGETHER, half - sent))
            reached["strangers"] += min(TOGETHER, half - sent)
            if crashed():
                return
            if reached["strangers"] % 4096 < TOGETHER:
                say(f"{reached['strangers']} of strangers")
        if not np.array_equal(client.pull({"canary": IDS})["canary"], before):
            raise Unsafe("strangers changed rows")
        if set(fetch_status(servers.address, servers.secret)["workers"]) - set(found["workers"]):
            raise Unsafe("strangers joined")
        while (sent := reached["holders"]) < frames - half:
            holders(targets, servers.secret, good, drawn, min(TOGETHER, frames - half - sent))
            reached["holders"] += min(TOGETHER, frames - half - sent)
            if crashed():
                return
            if reached["holders"] % 4096 < TOGETHER:
                say(f"{reached['holders']} of holders")
        client.push({"canary": (IDS, np.ones((len(IDS), 4), np.float32))})
        client.flush()
        client.pull({"canary": IDS})


def main() -> int:
    """Attack two servers; 1 if something gave way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with Servers(2, replicas=2, shards=16) as servers:
        try:
            answer = attack(servers, asked.frames, asked.seed, say=lambda text: print(text, flush=True))
        except Unsafe as error:
            print(f"UNSAFE: {error}")
            answer = None
        if answer is None or answer["crashes"]:
            for child in (servers.controller, *servers.servers.values()):
                print(child.describe_end())
    if answer is None:
        return 1
    print(answer)
    if asked.json:
        asked.json.write_text(json.dumps(answer, indent=1) + "\n")
    return int(answer["crashes"] > 0)


if __name__ == "__main__":
    sys.exit(main())
