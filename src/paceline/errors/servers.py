"""Parameter servers: lost, refused, damaged; ids and bags that make no sense."""

from __future__ import annotations

from typing import Any

from paceline.errors.base import PacelineError


class ServerError(PacelineError, RuntimeError):
    """A parameter server did not do what was asked.

    Attributes:
        server: Its index among the servers of this connection.
        address: Where it is, or was.
        table: The table concerned, where there is one.
    """

    def __init__(
        self,
        message: str,
        *,
        server: int = -1,
        address: str = "",
        table: str | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message, **facts)
        self.server = server
        self.address = address
        self.table = table


class ServerLostError(ServerError, ConnectionError):
    """A server did not answer before the deadline, or came back without its state."""


class ServerRefusedError(ServerError):
    """A server refused a message.

    Attributes:
        code: Which kind of refusal, as in ``docs/decisions/0007-parameter-servers.md``.
        id: The id concerned, where there is one.
    """

    def __init__(
        self, message: str, *, code: str = "", id: int | None = None, **facts: Any
    ) -> None:
        super().__init__(message, **facts)
        self.code = code
        self.id = id


class PushRefusedError(ServerRefusedError):
    """A server refused earlier pushes, of which nobody waits for the answer.

    Attributes:
        pushes: How many, of all servers.
        rows: How many rows were in them.
    """

    def __init__(self, message: str, *, pushes: int = 0, rows: int = 0, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.pushes = pushes
        self.rows = rows


class ServerKeyError(ServerError, PermissionError):
    """A server does not accept this trainer's key, or is not the one that it claims to be."""


class ServersClosedError(ServerError):
    """A connection to servers was used after it was closed, or in a forked child."""


class IdRangeError(PacelineError, IndexError, RuntimeError):
    """An id is outside of its table.

    Attributes:
        table: The table's name.
        id: The id.
    """

    def __init__(self, message: str, *, table: str = "", id: int = -1, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.table = table
        self.id = id


class BagsError(PacelineError, ValueError, NotImplementedError):
    """Ids, offsets or weights that are no bags: wrong shape, dtype or order."""


class ServerStartError(PacelineError, RuntimeError):
    """A parameter server cannot start: its address or directory is taken, or a key is missing."""


class ServerStateError(ServerStartError):
    """A parameter server's journal or snapshot is damaged, or of another version."""
