"""What is declared: offered to every server, taken when all can hold it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from echelon.server.controller.checkpoints import Checkpoints
from echelon.server.controller.state import Offer, Session
from echelon.server.protocol import wire


class Specs(Checkpoints):
    """Tables and dense parameters."""

    def _declare(self, now: float, peer: Hashable, request: int, spec: dict[str, Any]) -> None:
        """First every server says whether it can hold it: what is on the disk must not end whoever reads it there."""
        if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
            raise wire.WireError("DECLARE: a spec with a name is expected")
        offer = next((each for each in self._offers.values() if each.spec["name"] == spec["name"]), None)
        known = next((each for each in self.specs if each["name"] == spec["name"]), offer.spec if offer else None)
        if known is not None and known != spec:
            self._refuse(
                peer,
                request,
                "StoreError",
                f"{spec['name']}: {', '.join(_differing(known, spec))}; use another name, or the same spec in every worker",
            )
        elif offer is not None:
            offer.askers.append((peer, request))
        elif known is not None:
            self._later(peer, request, wire.DONE, {})
        else:
            self._numbers += 1
            self._offers[self._numbers] = Offer(spec=spec, askers=[(peer, request)])
            self._ask_offers(now)

    def _ask_offers(self, now: float) -> None:
        """Ask servers that have not said yet whether they can hold what is declared; take it where all have."""
        for number, offer in list(self._offers.items()):
            if now >= offer.again:
                offer.again = now + 1.0
                for other, session in self.sessions.items():
                    if session.role == "server" and session.name not in offer.able:
                        self._send(other, wire.DECLARE, 0, {"spec": offer.spec, "of": number})
            if set(self.map.servers) <= offer.able:
                del self._offers[number]
                self.specs = [*self.specs, offer.spec]
                self._publish()
                for peer, request in offer.askers:
                    self._later(peer, request, wire.DONE, {})

    def _offered(self, now: float, session: Session, number: int, error: str | None) -> None:
        """A server says whether it can hold what is declared."""
        offer = self._offers[number]
        if error is None:
            offer.able.add(session.name)
            self._ask_offers(now)
            return
        del self._offers[number]
        for peer, request in offer.askers:
            self._refuse(peer, request, "StoreError", f"server {session.name} cannot hold it: {error}")


def _differing(known: Any, given: Any, path: str = "") -> list[str]:
    """The fields in which two specs differ, with both values."""
    if isinstance(known, dict) and isinstance(given, dict):
        names = [*known, *(name for name in given if name not in known)]
        return [
            words
            for name in names
            for words in _differing(known.get(name), given.get(name), f"{path}.{name}".lstrip("."))
        ]
    return [] if known == given else [f"{path} was declared as {known!r} and is {given!r} now"]
