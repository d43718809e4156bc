"""Both ends prove themselves, or nobody speaks."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from echelon.server.protocol import auth as door

ONE, OTHER = bytes(32), bytes([1]) * 32


def meet(ours: bytes, theirs: bytes, role: int = door.WORKER) -> door.ListenerHandshake:
    """A caller with one secret, a listener with another."""
    caller, listener = door.CallerHandshake(ours, role), door.ListenerHandshake(theirs)
    listener.feed(caller.feed(listener.feed(caller.hello)))
    return listener


def test_holders_meet() -> None:
    """With one secret both are sure, and the listener knows the role."""
    listener = meet(ONE, ONE, door.SERVER)
    assert listener.done
    assert listener.role == door.SERVER


def test_strangers_do_not() -> None:
    """A listener without the secret is told from its first answer; a caller without it from its own."""
    with pytest.raises(door.SecretError, match="does not hold this job's secret"):
        meet(ONE, OTHER)
    caller, listener = door.CallerHandshake(ONE, door.WORKER), door.ListenerHandshake(ONE)
    proof = bytearray(caller.feed(listener.feed(caller.hello)))
    proof[0] ^= 1
    with pytest.raises(door.SecretError):
        listener.feed(bytes(proof))
    assert not listener.done


def test_nothing_is_used_twice() -> None:
    """A proof that was overheard opens nothing: not another connection, not the other way round."""
    caller, listener = door.CallerHandshake(ONE, door.WORKER), door.ListenerHandshake(ONE)
    reply = listener.feed(caller.hello)
    proof = caller.feed(reply)
    again = door.ListenerHandshake(ONE)
    again.feed(caller.hello)
    with pytest.raises(door.SecretError):
        again.feed(proof)
    turned = door.ListenerHandshake(ONE)
    turned.feed(caller.hello)
    with pytest.raises(door.SecretError):
        turned.feed(reply[-32:])
    # The role is part of the proof.
    raised = door.CallerHandshake(ONE, door.ADMIN)
    with pytest.raises(door.SecretError):
        raised.feed(door.ListenerHandshake(ONE).feed(caller.hello))


def test_other_protocols() -> None:
    """Another version is told apart from another secret."""
    caller = door.CallerHandshake(ONE, door.WORKER)
    reply = bytearray(door.ListenerHandshake(ONE).feed(caller.hello))
    reply[4] = 99
    with pytest.raises(door.SecretError, match="protocol 99"):
        caller.feed(bytes(reply))
    with pytest.raises(door.SecretError, match="no part"):
        door.ListenerHandshake(ONE).feed(bytes(40))


def test_over_a_socket() -> None:
    """The blocking end, against a listener fed by hand; one that hangs up is an error."""
    ours, theirs = socket.socketpair()
    calling = threading.Thread(target=door.authenticate, args=(ours, ONE, door.WORKER))
    calling.start()
    listener = door.ListenerHandshake(ONE)
    while not listener.done:
        data = theirs.recv(listener.bytes_needed, socket.MSG_WAITALL)
        theirs.sendall(listener.feed(data))
    calling.join()
    theirs.close()
    with pytest.raises((door.SecretError, OSError)):
        door.authenticate(ours, ONE, door.WORKER)
    ours.close()


def test_files(tmp_path: Path) -> None:
    """A secret's file is private, whole and long enough."""
    path = tmp_path / "secret"
    made = door.make_secret()
    door.write_secret(path, made)
    assert door.read_secret(path) == made
    assert path.stat().st_mode & 0o777 == 0o600
    os.chmod(path, 0o640)
    with pytest.raises(door.SecretError, match="chmod 600"):
        door.read_secret(path)
    with pytest.raises(door.SecretError, match="cannot be read"):
        door.read_secret(tmp_path / "none")
    with pytest.raises(door.SecretError, match="can be guessed"):
        door.parse_secret("abcd")
    with pytest.raises(door.SecretError, match="hexadecimal"):
        door.parse_secret("password")
