"""Control messages from the trainer's side: one question to one server, and a load on all of them.

Called by ``ps/client/connection.py``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import ServerError
from paceline.ps.client.channel import Channel
from paceline.ps.client.ledger import OpenRequest
from paceline.ps.protocol.wire import Kind, unpack

log = logging.getLogger("paceline.ps")


def ask(channel: Channel, kind: Kind, control: Mapping[str, Any], what: str = "") -> OpenRequest:
    """Send a control message."""
    text = json.dumps(control, separators=(",", ":"), allow_nan=False).encode()
    return channel.post(OpenRequest(kind, what or kind.name.lower(), text))


def answer(channel: Channel, pending: OpenRequest, timeout_s: float | None) -> dict[str, Any]:
    """Wait for what it answers."""
    return dict(unpack(channel.wait(pending, timeout_s)).control)


def load_everywhere(
    channels: Sequence[Channel], control: Mapping[str, Any], timeout_s: float | None
) -> None:
    """Load on all servers, in two steps; see [Note: two steps] in ``ps/server/loads.py``.

    Raises:
        ServerError: One cannot get ready, and nothing has changed; or one that was ready failed.
    """
    staged, errors = _ask_each(channels, Kind.STAGE, [control] * len(channels), timeout_s)
    if errors:
        _forget(channels, staged)
        error = next(iter(errors.values()))
        error.args = (f"{error}. No server has loaded anything", *error.args[1:])
        raise error
    controls = [
        {**control, "staged": staged[channel.server.index]["staged"]} for channel in channels
    ]
    loaded, errors = _ask_each(channels, Kind.LOAD, controls, timeout_s)
    if errors:
        error = next(iter(errors.values()))
        text = f"Servers that have loaded: {_named(loaded)}; that have not: {_named(errors)}"
        error.args = (f"{error}. {text}. Load again, or go back to another save", *error.args[1:])
        raise error


def _ask_each(
    channels: Sequence[Channel],
    kind: Kind,
    controls: Sequence[Mapping[str, Any]],
    timeout_s: float | None,
) -> tuple[dict[int, dict[str, Any]], dict[int, ServerError]]:
    """For each server its answer, or why there is none."""
    both = list(zip(channels, controls, strict=True))
    asked = [ask(channel, kind, control, what="load") for channel, control in both]
    answers: dict[int, dict[str, Any]] = {}
    errors: dict[int, ServerError] = {}
    for channel, pending in zip(channels, asked, strict=True):
        try:
            answers[channel.server.index] = answer(channel, pending, timeout_s)
        except ServerError as error:
            channel.abandon(pending)
            errors[channel.server.index] = error
    return answers, errors


def _forget(channels: Sequence[Channel], staged: Mapping[int, Mapping[str, Any]]) -> None:
    """Let servers delete what they have ready. If one does not, its next load does."""
    for channel in channels:
        token = staged.get(channel.server.index, {}).get("staged")
        if token is not None:
            pending = ask(channel, Kind.STAGE, {"forget": token}, what="load")
            channel.abandon(pending)


def _named(servers: Mapping[int, object]) -> str:
    return ", ".join(map(str, sorted(servers))) or "none"
