"""Tables and dense parameters that workers declare: offered to every server, declared once all can hold them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from echelon.server.controller.state import ControllerState, PendingDeclaration
from echelon.server.protocol import wire
from echelon.server.protocol.specs import StoreError


def on_declare(controller: ControllerState, now: float, peer: Hashable, frame: wire.Frame) -> None:
    """DECLARE. Every server first checks that it has room: a spec in the document that a server cannot hold would end the server."""
    spec = frame.meta["spec"]
    if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
        raise wire.WireError("DECLARE: expected a spec with a name")
    name, requester = spec["name"], (peer, frame.request_id)
    pending = next((other for other in controller.declarations.values() if other.spec["name"] == name), None)
    declared = next((other for other in controller.specs if other["name"] == name), pending.spec if pending else None)
    if declared is not None and declared != spec:
        differences = ", ".join(_differing_fields(declared, spec))
        raise StoreError(f"{name}: {differences}; use another name, or the same spec in every worker")
    if pending is not None:
        pending.requesters.append(requester)
    elif declared is not None:
        controller.answer_once_installed(requester, wire.DONE, {})
    else:
        controller.last_request_id += 1
        controller.declarations[controller.last_request_id] = PendingDeclaration(spec, [requester])
        request_declarations(controller, now)


def request_declarations(controller: ControllerState, now: float) -> None:
    """Ask the servers that have not answered; declare what all of them can hold."""
    for number, declaration in list(controller.declarations.items()):
        if now >= declaration.retry_at:
            declaration.retry_at = now + 1.0
            for peer, session in controller.sessions.items():
                if session.role == "server" and session.name not in declaration.accepted_by:
                    controller.send(peer, wire.DECLARE, 0, {"spec": declaration.spec, "of": number})
        if set(controller.map.servers) <= declaration.accepted_by:
            del controller.declarations[number]
            controller.specs = [*controller.specs, declaration.spec]
            controller.publish_map()
            for requester in declaration.requesters:
                controller.answer_once_installed(requester, wire.DONE, {})


def on_declaration_answer(controller: ControllerState, now: float, server: str, number: int, error: str | None) -> None:
    """DONE: a server can hold a spec, or why it cannot."""
    declaration = controller.declarations[number]
    if error is None:
        declaration.accepted_by.add(server)
        request_declarations(controller, now)
        return
    del controller.declarations[number]
    for requester in declaration.requesters:
        controller.refuse(*requester, "StoreError", f"server {server} cannot hold it: {error}")


def _differing_fields(declared: Any, new: Any, path: str = "") -> list[str]:
    """The fields in which two specs differ, with both values."""
    if not isinstance(declared, dict) or not isinstance(new, dict):
        return [] if declared == new else [f"{path} was declared as {declared!r} and is {new!r} now"]
    pairs = ((f"{path}.{name}".lstrip("."), declared.get(name), new.get(name)) for name in declared | new)
    return [difference for name, old, other in pairs for difference in _differing_fields(old, other, name)]
