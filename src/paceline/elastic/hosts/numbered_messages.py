"""Messages between a launcher and the coordinator that survive the connection they were sent on.

Pure. Each message has a number; what the other end has not confirmed is sent again when the two
have connected anew, and what comes twice is dropped. So a link that was away for less than a lease
costs nothing. Beats and their answers are not numbered, but confirm.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from paceline.errors import MembershipError

MAX_UNHEARD = 100_000


class NumberedMessages:
    """One direction's unconfirmed messages, and how far the other direction has been heard.

    Attributes:
        heard: The number of the last message that came.
    """

    def __init__(self) -> None:
        self.heard = 0
        self._next = 1
        self._unheard: deque[dict[str, Any]] = deque()

    def say(self, kind: str, **facts: Any) -> dict[str, Any]:
        """Number a message and keep it until it is confirmed.

        Raises:
            MembershipError: Nothing was confirmed for very long.
        """
        if len(self._unheard) >= MAX_UNHEARD:
            raise MembershipError(f"{MAX_UNHEARD} messages wait to be confirmed")
        message = {"kind": kind, **facts, "n": self._next}
        self._next += 1
        self._unheard.append(message)
        return message

    def take(self, message: dict[str, Any]) -> bool:
        """Say whether a message that came is new. What it confirms is forgotten.

        Raises:
            MembershipError: One before it is missing, which cannot be.
        """
        self.confirm(int(message.get("heard", 0)))
        number = int(message.get("n", 0))
        if not number:
            return True
        if number > self.heard + 1:
            raise MembershipError(f"message {number} came after message {self.heard}")
        is_new = number == self.heard + 1
        self.heard = max(self.heard, number)
        return is_new

    def confirm(self, number: int) -> None:
        """The other end has heard all up to this one."""
        while self._unheard and self._unheard[0]["n"] <= number:
            self._unheard.popleft()

    def unheard(self) -> list[dict[str, Any]]:
        """What is to be sent again, in order."""
        return list(self._unheard)
