"""Who may speak: both ends of a connection prove that they hold the job's secret before anything else is read.

    caller  -> listener   magic, protocol, role, nonce of the caller                        40 bytes
    listener -> caller    magic, protocol, role, nonce of the listener, its proof           72 bytes
    caller  -> listener   the caller's proof                                                32 bytes

A proof is HMAC-SHA256 under the secret over (whose proof, protocol, role, both nonces). The secret never travels and neither proof can
be turned round or used again. What follows is neither encrypted nor signed: it is for a network whose wires are trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import stat
import struct
import time
from pathlib import Path

from echelon.errors import ServerError

PROTOCOL = 2
LIMIT = 5.0  # seconds that a caller has to prove itself
WORKER, SERVER, ADMIN = 1, 2, 3
ROLES = {WORKER: "worker", SERVER: "server", ADMIN: "admin"}

_MAGIC = b"EHLO"
_OPEN = struct.Struct("<4sHBx32s")
_REPLY = struct.Struct("<4sHBx32s32s")
_SHORTEST = 16


class SecretError(ServerError):
    """The other end does not hold this job's secret, or the secret's file is not private."""


class Unproved(SecretError):  # noqa: N818 (what happened; its base says error)
    """The other end did not get as far as a proof: it is just ending, or starved. To be tried again."""


def make_secret() -> bytes:
    """A fresh secret."""
    return secrets.token_bytes(32)


def write_secret(path: Path, secret: bytes) -> None:
    """Write a secret to a new file that only its owner may read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secret.hex() + "\n")


def read_secret(path: Path) -> bytes:
    """The secret in a file; refused where others may read it."""
    try:
        mode, text = path.stat().st_mode, path.read_text()
    except OSError as error:
        raise SecretError(
            f"{path}: the secret cannot be read ({error.strerror}); give --secret-file of this job"
        ) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SecretError(f"{path}: mode {stat.S_IMODE(mode):o} lets others read the secret; chmod 600 {path}")
    return parse_secret(text)


def parse_secret(text: str) -> bytes:
    """A secret from its hexadecimal digits."""
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        raise SecretError(
            "the secret is not written in hexadecimal digits; make one with `openssl rand -hex 32`"
        ) from None
    if len(secret) < _SHORTEST:
        raise SecretError(f"a secret of {len(secret)} bytes can be guessed; use at least {_SHORTEST}")
    return secret


def _proof(secret: bytes, whose: bytes, role: int, caller: bytes, listener: bytes) -> bytes:
    text = b"echelon server " + whose + struct.pack("<HB", PROTOCOL, role) + caller + listener
    return hmac.new(secret, text, hashlib.sha256).digest()


class Caller:
    """The calling end, without a socket: send `opening`, then `feed` what comes until `done`."""

    def __init__(self, secret: bytes, role: int) -> None:
        self._secret, self._role, self._nonce = secret, role, secrets.token_bytes(32)
        self.opening = _OPEN.pack(_MAGIC, PROTOCOL, role, self._nonce)
        self.needs = _REPLY.size
        self.done = False

    def feed(self, reply: bytes) -> bytes:
        """The listener's reply (all `needs` bytes): our proof, to be sent."""
        magic, protocol, role, nonce, proof = _REPLY.unpack(reply)
        if magic != _MAGIC:
            raise SecretError("the other end is no echelon server")
        if protocol != PROTOCOL:
            raise SecretError(
                f"the other end speaks protocol {protocol}, this one {PROTOCOL}; install one version on both"
            )
        if role != self._role or not hmac.compare_digest(
            proof, _proof(self._secret, b"listener", self._role, self._nonce, nonce)
        ):
            raise SecretError("the other end does not hold this job's secret; give both the same")
        self.done = True
        return _proof(self._secret, b"caller", self._role, self._nonce, nonce)


class Listener:
    """The listening end, without a socket: `feed` exactly `needs` bytes until `done`; `role` says who it is then."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._nonce = secret, secrets.token_bytes(32)
        self._caller = b""
        self.role = 0
        self.needs = _OPEN.size
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """What the caller sent: what to send back."""
        if not self._caller:
            magic, _protocol, role, nonce = _OPEN.unpack(data)
            if magic != _MAGIC or role not in ROLES:
                raise SecretError("a caller that is no part of echelon")
            self.role, self._caller, self.needs = role, nonce, 32
            return _REPLY.pack(
                _MAGIC, PROTOCOL, role, self._nonce, _proof(self._secret, b"listener", role, nonce, self._nonce)
            )
        if not hmac.compare_digest(data, _proof(self._secret, b"caller", self.role, self._caller, self._nonce)):
            raise SecretError("a caller that does not hold this job's secret")
        self.done = True
        self.needs = 0
        return b""


def greet(connection: socket.socket, secret: bytes, role: int, *, limit: float = LIMIT) -> None:
    """The calling end over a blocking socket."""
    before = connection.gettimeout()
    caller, deadline, reply = Caller(secret, role), time.monotonic() + limit, b""
    try:
        connection.settimeout(limit)
        connection.sendall(caller.opening)
        while len(reply) < caller.needs:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = connection.recv(caller.needs - len(reply))
            if not part:
                raise Unproved("the other end hung up before it proved that it holds this job's secret")
            reply += part
        connection.sendall(caller.feed(reply))
    except TimeoutError:
        raise Unproved(f"the other end did not prove itself within {limit:g} s") from None
    finally:
        connection.settimeout(before)
