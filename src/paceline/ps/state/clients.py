"""What each client has had applied: the server's half of *exactly once* (decision 0007).

Called by ``ps/state/store.py``, live and in replay alike, so everything here depends on the order
of sequenced messages and on nothing else.
"""

from __future__ import annotations

import enum
import struct

from paceline.ps.protocol.wire import Head
from paceline.ps.state.refusal import Code, Refusal

MOST_CLIENTS = 1 << 14
"""So many are remembered. The one that has been silent longest is forgotten; if it comes back, it
is told of a gap, and never has a push applied twice."""
MOST_REFUSALS = 8
"""So many refusals of each client are remembered, to be repeated to who asks again."""


class Admission(enum.Enum):
    """What a sequence number means."""

    NEW = "new"
    """The next one: do it."""
    AGAIN = "again"
    """It has been done, or refused: say so again, and do nothing."""


ACCOUNT = struct.Struct("<Q16s")
"""Applied, client; ``pl_account`` in ``native/ps/rows.h``."""


class Client:
    """One connection of one trainer.

    Args:
        client: Who.
        applied: The last number that was applied or refused.
        refusals: By number; None is none, which is what nearly all clients have.
        refused: How many there were, forgotten ones included.

    Attributes:
        account: ``applied`` and the client, as ``native/ps/answer.c`` reads and counts them.
        is_pinned: It may push without coming by here, so it is not forgotten.
    """

    __slots__ = ("account", "is_pinned", "refusals", "refused")

    def __init__(
        self,
        client: bytes,
        applied: int = 0,
        refusals: dict[int, Refusal] | None = None,
        refused: int = 0,
    ) -> None:
        self.account = bytearray(ACCOUNT.pack(applied, client))
        self.refusals = refusals
        self.refused = refused
        self.is_pinned = False

    @property
    def applied(self) -> int:
        """The last number that was applied or refused."""
        found: int = ACCOUNT.unpack_from(self.account)[0]
        return found

    @applied.setter
    def applied(self, value: int) -> None:
        struct.pack_into("<Q", self.account, 0, value)


class Clients:
    """All clients of a server, the most recent last."""

    def __init__(self) -> None:
        self._clients: dict[bytes, Client] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def applied(self, client: bytes) -> int:
        """The last number of this client that was applied or refused; 0 for a stranger."""
        known = self._clients.get(client)
        return 0 if known is None else known.applied

    def refusals(self, client: bytes) -> tuple[int, dict[int, Refusal]]:
        """How many messages of this client were refused, and the last ones by number."""
        known = self._clients.get(client)
        return (0, {}) if known is None else (known.refused, known.refusals or {})

    def account(self, client: bytes) -> bytearray | None:
        """Its account, if it is known."""
        known = self._clients.get(client)
        return None if known is None else known.account

    def refresh(self, client: bytes) -> None:
        """It has had a push applied: now it is the most recent one."""
        self._clients[client] = self._clients.pop(client)

    def admit(self, head: Head) -> Admission:
        """Say whether a sequenced message is new.

        Raises:
            Refusal: There is a gap before it; or it was refused before.
        """
        known = self._clients.get(head.client)
        applied = 0 if known is None else known.applied
        if head.sequence == applied + 1:
            return Admission.NEW
        if head.sequence > applied:
            raise Refusal(
                Code.GAP,
                f"number {head.sequence} of client {head.client.hex()[:8]} came after {applied}; "
                "say HELLO and send again what is missing",
            )
        if known is not None and known.refusals and head.sequence in known.refusals:
            raise known.refusals[head.sequence]
        return Admission.AGAIN

    def count(self, head: Head, refusal: Refusal | None) -> None:
        """The message with the next number has been applied, or refused."""
        known = self._clients.pop(head.client, None) or Client(head.client)
        self._clients[head.client] = known  # now the most recent
        known.applied = head.sequence
        if refusal is not None:
            known.refused += 1
            known.refusals = {**(known.refusals or {}), head.sequence: refusal}
            if len(known.refusals) > MOST_REFUSALS:
                del known.refusals[next(iter(known.refusals))]
        self._forget_one()

    def pin(self, client: bytes) -> bytearray:
        """The account of a client that may push without coming by here, until ``unpin``."""
        known = self._clients.get(client)
        if known is None:
            known = self._clients[client] = Client(client)
            self._forget_one()
        known.is_pinned = True
        return known.account

    def unpin(self, client: bytes) -> None:
        """It cannot any more."""
        known = self._clients.pop(client, None)
        if known is not None:
            known.is_pinned = False
            self._clients[client] = known  # now the most recent

    def _forget_one(self) -> None:
        if len(self._clients) > MOST_CLIENTS:
            oldest = next(
                (name for name, each in self._clients.items() if not each.is_pinned), None
            )
            if oldest is not None:
                del self._clients[oldest]

    def items(self) -> list[tuple[bytes, Client]]:
        """All of them, for a snapshot."""
        return list(self._clients.items())

    def restore(self, client: Client) -> None:
        """Take one from a snapshot, in its order."""
        self._clients[bytes(client.account[-16:])] = client
