"""A worker's connections to all servers: frames out and in without blocking, connections that end are made again.

One thread, one `poll`. A line that ends tells its owner; what was under way over it is the owner's to send again.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from echelon.errors import EchelonError
from echelon.server.client.connection import Line, Request

#: A dial (connecting and the handshake) that takes longer is given up and begun again.
DIAL = 3.0
#: Seconds until a server is dialled again: the first time, and at most.
FIRST_DELAY, LAST_DELAY = 0.01, 0.25


class Courier:
    """All lines of a worker. `regained(server)` is called when one can be used, `lost(server, requests)` when one ended."""

    def __init__(
        self,
        secret: bytes,
        *,
        regained: Callable[[str], None],
        lost: Callable[[str, list[Request]], None],
    ) -> None:
        self._secret, self._regained, self._lost = secret, regained, lost
        self._addresses: dict[str, str] = {}
        self._lines: dict[str, Line] = {}
        self._by_file: dict[int, Line] = {}
        self._poll = select.poll()
        self._bell: tuple[int, Callable[[], None]] | None = None
        #: Servers without a line: when to dial next; and after how long the time after that.
        self._due: dict[str, float] = {}
        self._delays: dict[str, float] = {}
        self._broken: list[tuple[Line, BaseException]] = []
        #: What came over lines that ended.
        self._moved = 0
        #: Why a server could not be reached the last time.
        self.why: dict[str, str] = {}

    def listen(self, file: int, ring: Callable[[], None]) -> None:
        """Call `ring` whenever this file has something to read."""
        self._bell = (file, ring)
        self._poll.register(file, select.POLLIN)

    def seat(self, addresses: dict[str, str]) -> None:
        """Where the servers are now: lines to others, or to other addresses, end; missing ones are dialled."""
        for server, line in list(self._lines.items()):
            if addresses.get(server) != line.address:
                self._end(line, "it left the map")
        for server in set(self._due) | set(addresses):
            if addresses.get(server) != self._addresses.get(server):
                self._due.pop(server, None)
                self._delays.pop(server, None)
        self._addresses = dict(addresses)
        for server in addresses:
            if server not in self._lines and server not in self._due:
                self._dial(server)

    @property
    def moved(self) -> int:
        """Grows while long answers are on their way in."""
        return self._moved + sum(line.moved for line in self._lines.values())

    def up(self, server: str) -> bool:
        """Whether requests can be sent to this server."""
        line = self._lines.get(server)
        return line is not None and line.ready

    def ask(self, server: str, request: Request) -> None:
        """Send a request to a server that is up. A connection that turns out to be dead is told of in the next `turn`."""
        line = self._lines[server]
        try:
            line.ask(request)
            self._poll.modify(line.socket, line.wants)
        except OSError as error:
            self._broken.append((line, error))

    def abandon(self, request: Request) -> None:
        """Take no notice of this request's answer."""
        request.dropped = True
        line = self._lines.get(request.server)
        if line is not None and line.receiving is request:
            self._broken.append((line, EOFError("its answer was no longer wanted")))

    def turn(self, timeout: float) -> None:
        """Wait at most so long for something to happen, and handle what did."""
        broken, self._broken = self._broken, []
        for line, error in broken:
            self._retry(line, error)
        if self._due:
            timeout = min(timeout, max(0.0, min(self._due.values()) - time.monotonic()))
        if broken:
            timeout = 0.0
        for file, events in self._poll.poll(timeout * 1e3):
            if self._bell is not None and file == self._bell[0]:
                self._bell[1]()
            elif file in self._by_file:
                self._serve(self._by_file[file], events)
        if self._due or not all(line.ready for line in self._lines.values()):
            self._look_after()

    def close(self) -> None:
        """End all lines."""
        for line in list(self._lines.values()):
            self._forget(line)
        self._addresses, self._due = {}, {}

    def _serve(self, line: Line, events: int) -> None:
        greeted = line.ready
        try:
            if events & select.POLLOUT:
                line.write()
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                line.read()
        except (OSError, EOFError, EchelonError) as error:
            self._retry(line, error)
            return
        except BaseException as error:  # whoever got an answer was interrupted: all that is unanswered is asked again
            self._broken.append((line, error))
            raise
        if self._lines.get(line.server) is not line:
            return
        self._poll.modify(line.socket, line.wants)
        if line.ready and not greeted:
            self.why.pop(line.server, None)
            self._delays.pop(line.server, None)
            self._regained(line.server)

    def _retry(self, line: Line, error: BaseException) -> None:
        if self._lines.get(line.server) is line:
            self._end(line, str(error) or "the connection ended")
            self._wait(line.server)

    def _wait(self, server: str) -> None:
        if server in self._addresses:
            delay = self._delays.get(server, FIRST_DELAY)
            self._due[server] = time.monotonic() + delay
            self._delays[server] = min(2 * delay, LAST_DELAY)

    def _look_after(self) -> None:
        """Give up dials that take too long; dial again what is due."""
        now = time.monotonic()
        for line in list(self._lines.values()):
            if not line.ready and now - line.began > DIAL:
                self._retry(line, TimeoutError(f"no handshake within {DIAL:g} s"))
        for server, when in list(self._due.items()):
            if when <= now:
                self._dial(server)

    def _dial(self, server: str) -> None:
        self._due.pop(server, None)
        try:
            line = Line(server, self._addresses[server], self._secret)
        except OSError as error:
            self.why[server] = str(error)
            self._wait(server)
            return
        self._lines[server] = self._by_file[line.socket.fileno()] = line
        self._poll.register(line.socket, line.wants)

    def _end(self, line: Line, why: str) -> None:
        self.why[line.server] = why
        self._forget(line)
        self._lost(line.server, [each for each in line.waiting.values() if not each.dropped])

    def _forget(self, line: Line) -> None:
        self._moved += line.moved
        del self._lines[line.server], self._by_file[line.socket.fileno()]
        self._poll.unregister(line.socket)
        line.close()
