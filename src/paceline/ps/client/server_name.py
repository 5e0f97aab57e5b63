"""A server as errors and log lines name it. Called by ``ps/client/channel.py`` and its callers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.errors import ServerError, ServerRefusedError
from paceline.ps.protocol.wire import Frame, control_of

_Error = TypeVar("_Error", bound=ServerError)


@dataclass(frozen=True)
class ServerName:
    """Which server, among those of this trainer, and where."""

    index: int
    address: str

    def __str__(self) -> str:
        return f"server {self.index} ({self.address})"

    def error(self, kind: Callable[..., _Error], what: str, text: str, **facts: Any) -> _Error:
        """An error about this server, in an operation."""
        return kind(text, server=self.index, address=self.address, operation=what, **facts)

    def refused(self, what: str, first: Frame) -> ServerRefusedError:
        """What the server says with an ERROR, whose first frame this is."""
        control = control_of(first)
        return self.error(
            ServerRefusedError,
            what,
            f"{self} refused {what}: {control.get('text')}",
            code=str(control.get("code")),
            id=control.get("id"),
            table=control.get("table"),
        )
