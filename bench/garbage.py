"""Mutated frames at the listeners of running servers: python -m bench.garbage [--frames 100000] [--seed 0] [--json OUT]

Half of them from strangers (no proof, a damaged one, one of another secret, each followed by a sound push and a sound pull), half from holders
of the secret. Nothing may crash or hang; strangers may neither read nor write a row, nor get a byte beyond the listener's own greeting.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets as tokens
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from echelon.server import Rule, Servers, Table, connect, wire
from echelon.server.loop import split
from echelon.server.secret import ADMIN, SERVER, WORKER, Caller, greet
from echelon.server.status import ask

IDS = np.arange(64)
REPLY = 72


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


def stranger(address: str, frames: list[bytes], drawn: random.Random) -> None:
    """One who does not hold the secret, in one of several ways; then sound frames."""
    with socket.create_connection(split(address), timeout=10.0) as connection:
        caller = Caller(tokens.token_bytes(32), drawn.choice([WORKER, SERVER, ADMIN]))
        way = drawn.random()
        try:
            if way < 0.4:
                connection.sendall(mutated(caller.opening, drawn))
            elif way < 0.7:
                connection.sendall(caller.opening + drawn.randbytes(32))
            connection.sendall(drawn.choice(frames[:2]) + mutated(drawn.choice(frames), drawn))
            connection.shutdown(socket.SHUT_WR)
            got = 0
            while part := connection.recv(4096):
                got += len(part)
        except TimeoutError:
            raise Unsafe("a listener neither answered nor hung up within 10 s") from None
        except OSError:
            return
        if got not in (0, REPLY):
            raise Unsafe(f"a stranger got {got} bytes")


def holder(address: str, secret: bytes, frames: list[bytes], drawn: random.Random, count: int) -> int:
    """One who holds it and sends garbage until the connection ends; how many frames went."""
    sent = 0
    with socket.create_connection(split(address), timeout=10.0) as connection:
        greet(connection, secret, drawn.choice([WORKER, WORKER, ADMIN]))
        connection.settimeout(10.0)
        try:
            while sent < count:
                connection.sendall(mutated(drawn.choice(frames), drawn))
                sent += 1
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
        except TimeoutError:
            raise Unsafe("a listener neither answered nor hung up within 10 s") from None
        except OSError:
            pass
    return max(sent, 1)


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
        for number in range(frames // 2):
            stranger(drawn.choice(targets), good, drawn)
            if number % 5000 == 0:
                say(f"{number} of strangers")
        if not np.array_equal(client.pull({"canary": IDS})["canary"], before):
            raise Unsafe("strangers changed rows")
        if set(ask(servers.address, servers.secret)["workers"]) != {"witness"}:
            raise Unsafe("strangers joined")
        sent = 0
        while sent < frames - frames // 2:
            sent += holder(drawn.choice(targets), servers.secret, good, drawn, 20)
            if sent % 5000 < 20:
                say(f"{sent} of holders")
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
        "strangers": frames // 2,
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
                print(child.said()[-1500:])
            return 1
    print(answer)
    if asked.json:
        asked.json.write_text(json.dumps(answer, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
