"""A change of membership, as users and the log see it: who, why, and how long each phase took."""

from __future__ import annotations

from dataclasses import dataclass

_MOST = 8  # that are told


@dataclass(frozen=True)
class MembershipEvent:
    """An epoch has begun.

    Attributes:
        epoch: Its number, from 0.
        why: What ended the epoch before it.
        rank: Of this process in it.
        world: How many ranks it has.
        step: The committed step that it goes on from.
        noticed_s: From the coordinator's word that the epoch was over until training here stopped.
        agreed_s: From then until all were ready and the new epoch was decided.
        rebuilt_s: How long the new group took.
        copied_s: How long copying the state took; 0 if nobody had to.
        first_step_s: From then until the first step was committed; 0 if none was.
    """

    epoch: int
    why: str
    rank: int
    world: int
    step: int
    noticed_s: float = 0.0
    agreed_s: float = 0.0
    rebuilt_s: float = 0.0
    copied_s: float = 0.0
    first_step_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All phases together: how long training stood still on this rank."""
        parts = (self.noticed_s, self.agreed_s, self.rebuilt_s, self.copied_s, self.first_step_s)
        return sum(parts)

    def describe(self) -> str:
        """One line for a log."""
        ranks = f"{self.world} rank{'s' if self.world > 1 else ''}"
        if self.epoch == 0:
            return f"epoch 0: {ranks}"
        phases = (
            f"noticed {self.noticed_s:.3f} s, agreed {self.agreed_s:.3f} s, "
            f"rebuilt {self.rebuilt_s:.3f} s, copied {self.copied_s:.3f} s, "
            + (f"first step {self.first_step_s:.3f} s" if self.first_step_s else "no step yet")
        )
        return (
            f"epoch {self.epoch}: {ranks} from step {self.step} on, because {self.why} ({phases})"
        )


class Reasons:
    """Why an epoch is over: several ranks may die at once. Kept by the coordinator."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, why: str) -> None:
        """One more, unless it is known."""
        if why not in self._found and len(self._found) < _MOST:
            self._found.append(why)

    def text(self) -> str:
        """All of them."""
        return "; ".join(self._found)

    def take(self) -> str:
        """All of them, for the epoch that begins."""
        text = self.text()
        self._found.clear()
        return text
