"""What is declared: offered to every server, taken when all can hold it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from echelon.server.controller.checkpoints import Checkpoints
from echelon.server.controller.state import MemberSession, PendingDeclaration
from echelon.server.protocol import wire


class Declarations(Checkpoints):
    """Tables and dense parameters."""

    def _declare(self, now: float, peer: Hashable, request_id: int, spec: dict[str, Any]) -> None:
        """First every server says whether it can hold it: what is on the disk must not end whoever reads it there."""
        if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
            raise wire.WireError("DECLARE: a spec with a name is expected")
        declaration = next(
            (candidate for candidate in self._declarations.values() if candidate.spec["name"] == spec["name"]), None
        )
        declared_spec = next(
            (candidate for candidate in self.specs if candidate["name"] == spec["name"]),
            declaration.spec if declaration else None,
        )
        if declared_spec is not None and declared_spec != spec:
            self._refuse(
                peer,
                request_id,
                "StoreError",
                f"{spec['name']}: {', '.join(_differing_fields(declared_spec, spec))}; use another name, or the same spec in every worker",
            )
        elif declaration is not None:
            declaration.requesters.append((peer, request_id))
        elif declared_spec is not None:
            self._answer_once_installed(peer, request_id, wire.DONE, {})
        else:
            self._last_request_id += 1
            self._declarations[self._last_request_id] = PendingDeclaration(spec=spec, requesters=[(peer, request_id)])
            self._request_declarations(now)

    def _request_declarations(self, now: float) -> None:
        """Ask servers that have not said yet whether they can hold what is declared; take it where all have."""
        for number, declaration in list(self._declarations.items()):
            if now >= declaration.retry_at:
                declaration.retry_at = now + 1.0
                for server_peer, session in self.sessions.items():
                    if session.role == "server" and session.name not in declaration.accepted_by:
                        self._send(server_peer, wire.DECLARE, 0, {"spec": declaration.spec, "of": number})
            if set(self.map.servers) <= declaration.accepted_by:
                del self._declarations[number]
                self.specs = [*self.specs, declaration.spec]
                self._publish_map()
                for peer, request_id in declaration.requesters:
                    self._answer_once_installed(peer, request_id, wire.DONE, {})

    def _on_declaration_answer(self, now: float, session: MemberSession, number: int, error: str | None) -> None:
        """A server says whether it can hold what is declared."""
        declaration = self._declarations[number]
        if error is None:
            declaration.accepted_by.add(session.name)
            self._request_declarations(now)
            return
        del self._declarations[number]
        for peer, request_id in declaration.requesters:
            self._refuse(peer, request_id, "StoreError", f"server {session.name} cannot hold it: {error}")


def _differing_fields(declared: Any, new: Any, path: str = "") -> list[str]:
    """The fields in which two specs differ, with both values."""
    if isinstance(declared, dict) and isinstance(new, dict):
        names = [*declared, *(name for name in new if name not in declared)]
        return [
            difference
            for name in names
            for difference in _differing_fields(declared.get(name), new.get(name), f"{path}.{name}".lstrip("."))
        ]
    return [] if declared == new else [f"{path} was declared as {declared!r} and is {new!r} now"]
