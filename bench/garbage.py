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
from pathlib import Path
from typing import Any

import numpy as np

from echelon.server import Rule, Servers, Table, connect, shared, wire
from echelon.server.loop import split
from echelon.server.secret import ADMIN, SERVER, WORKER, Caller, greet
from echelon.server.status import ask

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
        wire.encode(wire.BEAT, 10, {"server": "s1", "incarnation": 1}),
        wire.encode(wire.HAIL, 11, {"head": "s9", "incarnation": 99, "member": 1, "v": 1, "link": 1}),
        wire.encode(wire.ENTRY, 12, {"n": 1, "v": 1}, [np.zeros(64, np.uint8)]),
        wire.encode(wire.CAUGHTUP, 13, {"shard": 0, "learner": "s1", "incarnation": 1, "version": 1}),
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
    caller = Caller(tokens.token_bytes(32), drawn.choice([WORKER, SERVER, ADMIN]))
    way = drawn.random()
    front = b""
    if way < 0.4:
        front = mutated(caller.opening, drawn)
    elif way < 0.7:
        front = caller.opening + drawn.randbytes(32)
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
        finally:
            connection.close()
        counts.append(got)
    return counts


def strangers(targets: list[str], frames: list[bytes], drawn: random.Random, count: int) -> None:
    """Many who do not hold the secret."""
    lines = []
    for _ in range(count):
        connection = socket.create_connection(split(drawn.choice(targets)), timeout=PATIENCE)
        lines.append((connection, unproved(frames, drawn)))
    for got in at_once(lines):
        if got not in (0, REPLY):
            raise Unsafe(f"a stranger got {got} bytes")


def holders(targets: list[str], secret: bytes, frames: list[bytes], drawn: random.Random, count: int) -> None:
    """Many who hold it, and send one frame of garbage each (a connection ends with the first that is none)."""
    lines, offers = [], []
    for _ in range(count):
        connection = socket.create_connection(split(drawn.choice(targets)), timeout=PATIENCE)
        greet(connection, secret, drawn.choice([WORKER, WORKER, ADMIN]), limit=PATIENCE)
        connection.settimeout(PATIENCE)
        data = mutated(drawn.choice(frames), drawn)
        made = shared.offer(connection) if drawn.random() < 0.25 else None
        if made is not None:
            offers.append(made)
            data = lent(made, data, drawn)
        lines.append((connection, data))
    at_once(lines)
    for made in offers:
        made.close()


def lent(made: shared.Offer, data: bytes, drawn: random.Random) -> bytes:
    """Garbage in memory, or an announcement or an offer that is garbage."""
    offered = b"".join(made.frame)
    data += bytes(max(0, shared.LEAST - len(data))) if drawn.random() < 0.5 else drawn.randbytes(shared.LEAST)
    note = b"".join(shared.Shared(made.area, first=True).lend([data]) or [])
    what = drawn.randrange(3)
    return (mutated(offered, drawn) if what == 0 else offered) + (mutated(note, drawn) if what == 1 else note)


def attack(servers: Servers, frames: int, seed: int, *, say: Any = lambda text: None) -> dict[str, Any]:
    """All of it; what was seen. Raises Unsafe."""
    drawn = random.Random(seed)
    began = time.monotonic()
    with connect(servers.address, secret=servers.secret, worker="witness") as client:
        client.declare(Table(name="canary", dim=4, rule=Rule(kind="sgd", lr=1.0)))
        client.push({"canary": (IDS, np.ones((len(IDS), 4), np.float32))})
        client.flush()
        before = client.pull({"canary": IDS})["canary"]
        found = ask(servers.address, servers.secret)
        targets = [servers.address, *(each["address"] for each in found["servers"].values())]
        good = sound(found["shards"])
        half, sent = frames // 2, 0
        while sent < half:
            strangers(targets, good, drawn, min(TOGETHER, half - sent))
            sent += min(TOGETHER, half - sent)
            if sent % 4096 < TOGETHER:
                say(f"{sent} of strangers, {time.monotonic() - began:.0f} s")
        if not np.array_equal(client.pull({"canary": IDS})["canary"], before):
            raise Unsafe("strangers changed rows")
        if set(ask(servers.address, servers.secret)["workers"]) - {"witness"}:
            raise Unsafe("strangers joined")
        sent = 0
        while sent < frames - half:
            holders(targets, servers.secret, good, drawn, min(TOGETHER, frames - half - sent))
            sent += min(TOGETHER, frames - half - sent)
            if sent % 4096 < TOGETHER:
                say(f"{sent} of holders, {time.monotonic() - began:.0f} s")
        client.push({"canary": (IDS, np.ones((len(IDS), 4), np.float32))})
        client.flush()
        client.pull({"canary": IDS})
    ended = [
        name
        for name, child in {"controller": servers.controller, **servers.servers}.items()
        if child.process.poll() is not None
    ]
    if ended:
        raise Unsafe(f"{', '.join(ended)} ended")
    seconds = time.monotonic() - began
    return {
        "frames": frames,
        "seed": seed,
        "strangers": half,
        "holders": sent,
        "seconds": round(seconds, 1),
        "crashes": 0,
    }


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
            for child in (servers.controller, *servers.servers.values()):
                print(child.end())
            return 1
    print(answer)
    if asked.json:
        asked.json.write_text(json.dumps(answer, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
