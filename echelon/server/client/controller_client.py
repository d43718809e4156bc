"""A worker's connection to the controller: a thread that joins, keeps the lease alive, and brings every new map.

The data path never waits for it: while the controller is down, maps are what they were.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from echelon.errors import EchelonError, ServerError
from echelon.server.protocol import wire
from echelon.server.protocol.auth import WORKER, SecretError, Unproved, greet
from echelon.server.protocol.event_loop import split
from echelon.server.protocol.shard_map import Map

#: Seconds between signs of life. A worker leaves the clocks after 2 s without one.
BEAT = 0.5
#: Seconds between attempts to reach a controller that is down.
RETRY = 0.1


@dataclass(slots=True)
class _Question:
    kind: int
    meta: dict[str, Any]
    answer: Future[wire.Frame]
    number: int = 0


class Herald:
    """`news()` gives the newest map since it was last asked. `bell` becomes readable when there is one, or an answer."""

    def __init__(self, address: str, secret: bytes, join: Mapping[str, Any]) -> None:
        self.address, self._place, self._secret, self._join = address, split(address), secret, dict(join)
        self.incarnation = 0
        self.settings: dict[str, Any] = {}
        self.specs: list[dict[str, Any]] = []
        #: Why the controller is not connected.
        self.why = "not tried yet"
        self.bell, self._ringer = os.pipe()
        self._waker, self._wake = os.pipe()
        os.set_blocking(self.bell, False)
        os.set_blocking(self._ringer, False)
        os.set_blocking(self._waker, False)
        self._lock = threading.Lock()
        self._map: Map | None = None
        self._version = -1
        self._new = False
        self._questions: list[_Question] = []
        self._fatal: EchelonError | None = None
        self._closing = False
        self.connected = False
        self._thread = threading.Thread(target=self._run, name="echelon-herald", daemon=True)
        self._thread.start()

    def news(self) -> Map | None:
        """The newest map, if it came since the last call. Raises what ended the thread."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.bell, 4096)
        if self._fatal is not None:
            raise self._fatal
        with self._lock:
            new, self._new = self._new, False
            return self._map if new else None

    def ask(self, kind: int, meta: dict[str, Any]) -> Future[wire.Frame]:
        """A request to the controller; asked again after it was away, so it must do no harm twice. Raises what ended the thread."""
        if self._fatal is not None:
            raise self._fatal
        question = _Question(kind=kind, meta=meta, answer=Future())
        with self._lock:
            self._questions.append(question)
        os.write(self._wake, b"!")
        return question.answer

    def forget(self, answer: Future[wire.Frame]) -> None:
        """Nobody waits for this answer any longer."""
        with self._lock:
            self._questions = [question for question in self._questions if question.answer is not answer]

    def close(self, *, leave: bool = True) -> None:
        """Leave the job (or only hang up) and end the thread."""
        if leave and self.connected and not self._closing:
            with contextlib.suppress(Exception):
                self.ask(wire.LEAVE, {}).result(timeout=1.0)
        self._closing = True
        with contextlib.suppress(OSError):
            os.write(self._wake, b"!")
        self._thread.join(timeout=5.0)
        for file in (self.bell, self._wake):
            with contextlib.suppress(OSError):
                os.close(file)

    def _run(self) -> None:
        try:
            self._go_on()
        finally:
            # By the thread that uses them: `close` does not wait for ever, and their numbers would be another file's by then.
            os.close(self._ringer)
            os.close(self._waker)

    def _go_on(self) -> None:
        while not self._closing:
            try:
                self._stay()
            except Unproved as error:
                self.why = str(error)
            except SecretError as error:
                self._fatal = SecretError(f"controller {self.address}: {error}")
                self._ring()
                return
            except (OSError, EOFError, EchelonError, KeyError, TypeError, ValueError) as error:
                self.why = str(error) or "the connection ended"
            self.connected = False
            if not self._closing:
                time.sleep(RETRY)

    def _stay(self) -> None:
        with socket.create_connection(self._place, timeout=5.0) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greet(connection, self._secret, WORKER)
            self._number = 1
            wire.send(connection, wire.encode(wire.JOIN, 1, self._join))
            answer = wire.receive(connection)
            while answer.request != 1:
                answer = wire.receive(connection)
            if answer.kind == wire.REFUSED:
                self._fatal = ServerError(f"controller {self.address}: {answer.meta.get('message')}")
                self._ring()
                self._closing = True
                return
            self.connected, self.why = True, "it is connected, and does not answer"
            # The controller gives each life of a worker a number; after a cut it goes on under the same one.
            self._join["incarnation"] = self.incarnation = int(answer.meta["incarnation"])
            self._take(answer)
            for question in self._questions:
                question.number = 0
            watching = self._send(connection, wire.WATCH, {"after": self._version})
            beat = time.monotonic()
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            poll.register(self._waker, select.POLLIN)
            while not self._closing:
                self._ask_all(connection)
                ready = dict(poll.poll(max(0.0, beat + BEAT - time.monotonic()) * 1e3))
                if self._waker in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._waker, 4096)
                if connection.fileno() in ready:
                    frame = wire.receive(connection)
                    if frame.kind == wire.MAP:
                        self._take(frame)
                        if frame.request == watching:
                            watching = self._send(connection, wire.WATCH, {"after": self._version})
                    else:
                        self._answer(frame)
                if time.monotonic() >= beat + BEAT:
                    beat = time.monotonic()
                    self._send(connection, wire.BEAT, {})

    def _send(self, connection: socket.socket, kind: int, meta: dict[str, Any]) -> int:
        self._number += 1
        wire.send(connection, wire.encode(kind, self._number, meta))
        return self._number

    def _ask_all(self, connection: socket.socket) -> None:
        with self._lock:
            fresh = [question for question in self._questions if not question.number]
        for question in fresh:
            question.number = self._send(connection, question.kind, question.meta)

    def _answer(self, frame: wire.Frame) -> None:
        with self._lock:
            found = [question for question in self._questions if question.number == frame.request]
            self._questions = [question for question in self._questions if question.number != frame.request]
        for question in found:
            question.answer.set_result(frame)
        self._ring()

    def _take(self, frame: wire.Frame) -> None:
        new = Map.from_document(frame.meta["map"])
        self.specs = frame.meta.get("specs", self.specs)
        self.settings = frame.meta.get("settings", self.settings)
        with self._lock:
            if new.version > self._version:
                self._map, self._version, self._new = new, new.version, True
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._ringer, b"!")
