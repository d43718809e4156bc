"""A worker's connection to the controller: what cannot be is said at once, and again to whoever asks later."""

from __future__ import annotations

import select
import socket

import pytest

from echelon.errors import ServerError
from echelon.server import connect
from echelon.server.client.controller_client import ControllerClient
from echelon.server.protocol import wire
from echelon.server.protocol.auth import ListenerHandshake, SecretError, make_secret


def test_an_address_that_is_none_is_refused_at_once() -> None:
    for address in ("localhost", "127.0.0.1:port", ":7000", "127.0.0.1:70000"):
        with pytest.raises(ServerError, match="is no address; write host:port"):
            connect(address, secret=make_secret())


def test_a_controller_of_another_job_is_told_to_everyone_who_asks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        herald = ControllerClient(f"127.0.0.1:{listener.getsockname()[1]}", make_secret(), {})
        other, _ = listener.accept()
        with other:
            door = ListenerHandshake(make_secret())
            other.sendall(door.feed(other.recv(door.bytes_needed, socket.MSG_WAITALL)))
            assert select.select([herald.notify_fd], [], [], 10.0)[0]
        for _ in range(2):
            with pytest.raises(SecretError, match="does not hold this job's secret"):
                herald.take_new_map()
            with pytest.raises(SecretError, match="does not hold this job's secret"):
                herald.send_request(wire.STATUS, {})
        herald.close()
