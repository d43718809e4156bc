"""Both ends of a connection prove that they hold the job's secret before anything else is read.

    caller  -> listener   magic, protocol, role, nonce of the caller                        40 bytes
    listener -> caller    magic, protocol, role, nonce of the listener, its proof           72 bytes
    caller  -> listener   the caller's proof                                                32 bytes

A proof is HMAC-SHA256 under the secret over (signer, protocol, role, both nonces). The secret is never sent, and neither proof can be
reflected or replayed. Frames are neither encrypted nor signed: the network must be trusted.
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

PROTOCOL_VERSION = 2
HANDSHAKE_TIMEOUT = 5.0  # seconds
WORKER, SERVER, ADMIN = 1, 2, 3

_MAGIC = b"EHLO"
_HELLO_STRUCT = struct.Struct("<4sHBx32s")
_REPLY_STRUCT = struct.Struct("<4sHBx32s32s")
_MIN_SECRET_BYTES = 16


class SecretError(ServerError):
    """The other end does not hold this job's secret, or the secret file is not private."""


class HandshakeAborted(SecretError):  # noqa: N818 (what happened; its base says error)
    """The other end sent no proof, because it is shutting down or starved. Retry."""


def make_secret() -> bytes:
    """A new random secret."""
    return secrets.token_bytes(32)


def write_secret(path: Path, secret: bytes) -> None:
    """Write a secret to a new file that only its owner may read."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secret.hex() + "\n")


def read_secret(path: Path) -> bytes:
    """The secret in a file that only its owner can read."""
    try:
        mode, text = path.stat().st_mode, path.read_text()
    except OSError as error:
        message = f"{path}: the secret cannot be read ({error.strerror}); give --secret-file of this job"
        raise SecretError(message) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SecretError(f"{path}: mode {stat.S_IMODE(mode):o} lets others read the secret; chmod 600 {path}")
    return parse_secret(text)


def parse_secret(text: str) -> bytes:
    """A secret from its hexadecimal digits."""
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        raise SecretError("the secret is not hexadecimal; create one with `openssl rand -hex 32`") from None
    if len(secret) < _MIN_SECRET_BYTES:
        raise SecretError(f"a secret of {len(secret)} bytes can be guessed; use at least {_MIN_SECRET_BYTES}")
    return secret


def _compute_proof(secret: bytes, signer: bytes, role: int, caller_nonce: bytes, listener_nonce: bytes) -> bytes:
    text = b"echelon server " + signer + struct.pack("<HB", PROTOCOL_VERSION, role) + caller_nonce + listener_nonce
    return hmac.new(secret, text, hashlib.sha256).digest()


class CallerHandshake:
    """The calling end, without a socket: send `hello`, then `feed` the replies until `done`."""

    def __init__(self, secret: bytes, role: int) -> None:
        self._secret, self._role, self._nonce = secret, role, secrets.token_bytes(32)
        self.hello = _HELLO_STRUCT.pack(_MAGIC, PROTOCOL_VERSION, role, self._nonce)
        self.bytes_needed, self.done = _REPLY_STRUCT.size, False

    def feed(self, reply: bytes) -> bytes:
        """Check the listener's reply, of `bytes_needed` bytes. Returns our proof, to be sent."""
        magic, protocol, role, nonce, proof = _REPLY_STRUCT.unpack(reply)
        if magic != _MAGIC:
            raise SecretError("the other end is no echelon server")
        if protocol != PROTOCOL_VERSION:
            message = f"the other end speaks protocol {protocol}, this one {PROTOCOL_VERSION}"
            raise SecretError(f"{message}; install one version on both")
        expected_proof = _compute_proof(self._secret, b"listener", self._role, self._nonce, nonce)
        if role != self._role or not hmac.compare_digest(proof, expected_proof):
            raise SecretError("the other end does not hold this job's secret; give both the same")
        self.done = True
        return _compute_proof(self._secret, b"caller", self._role, self._nonce, nonce)


class ListenerHandshake:
    """The listening end, without a socket: `feed` exactly `bytes_needed` bytes until `done`; `role` is then the caller's."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._nonce = secret, secrets.token_bytes(32)
        self._caller_nonce = b""
        self.role, self.bytes_needed, self.done = 0, _HELLO_STRUCT.size, False

    def feed(self, data: bytes) -> bytes:
        """Check what the caller sent. Returns the reply."""
        if not self._caller_nonce:
            magic, _protocol, role, nonce = _HELLO_STRUCT.unpack(data)
            if magic != _MAGIC or role not in (WORKER, SERVER, ADMIN):
                raise SecretError("a caller that is no part of echelon")
            self.role, self._caller_nonce, self.bytes_needed = role, nonce, 32
            proof = _compute_proof(self._secret, b"listener", role, nonce, self._nonce)
            return _REPLY_STRUCT.pack(_MAGIC, PROTOCOL_VERSION, role, self._nonce, proof)
        expected_proof = _compute_proof(self._secret, b"caller", self.role, self._caller_nonce, self._nonce)
        if not hmac.compare_digest(data, expected_proof):
            raise SecretError("a caller that does not hold this job's secret")
        self.done, self.bytes_needed = True, 0
        return b""


def authenticate(connection: socket.socket, secret: bytes, role: int, *, timeout: float = HANDSHAKE_TIMEOUT) -> None:
    """Run the calling end over a blocking socket."""
    previous_timeout = connection.gettimeout()
    handshake, deadline, reply = CallerHandshake(secret, role), time.monotonic() + timeout, b""
    try:
        connection.settimeout(timeout)
        connection.sendall(handshake.hello)
        while len(reply) < handshake.bytes_needed:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            chunk = connection.recv(handshake.bytes_needed - len(reply))
            if not chunk:
                raise HandshakeAborted("the other end hung up before it proved that it holds this job's secret")
            reply += chunk
        connection.sendall(handshake.feed(reply))
    except TimeoutError:
        raise HandshakeAborted(f"the other end did not prove itself within {timeout:g} s") from None
    finally:
        connection.settimeout(previous_timeout)
