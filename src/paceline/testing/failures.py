"""What went wrong in a call of ``run_ranks``, per rank, and the error that tells it.

Raised by :mod:`paceline.testing.ranks`. Knows nothing about processes: it is given what happened.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import PacelineError

_INDENT = "    "


class Outcome(enum.Enum):
    """How a rank ended; each says what it looks like to a reader."""

    RAISED = "raised"  # fn raised; the traceback is known
    EXITED = "exited"  # the process went away by itself: a signal, os._exit, a crash
    STOPPED = "stopped"  # it was still running and got killed; its stacks are known
    LINGERED = "lingered"  # fn returned, but the process did not end cleanly


@dataclass(frozen=True)
class RankFailure:
    """One rank that did not return.

    Attributes:
        rank: Which one.
        outcome: How it ended.
        summary: One line, for example ``"ValueError: no such layer"`` or ``"killed by SIGKILL"``.
        detail: The traceback or the stacks of all threads; may be empty.
        after_s: Seconds from the start of the ranks until this was known.
    """

    rank: int
    outcome: Outcome
    summary: str
    detail: str
    after_s: float

    def describe(self) -> str:
        """Return a headed block of text: which rank, what happened, when, and where it was."""
        head = f"--- rank {self.rank}: {self.summary} (after {self.after_s:.2f} s)"
        body = "\n".join(_INDENT + line for line in self.detail.strip().splitlines())
        return f"{head}\n{body}" if body else head


class RanksFailedError(PacelineError, RuntimeError):
    """At least one rank of ``run_ranks`` raised, died, or was not done in time.

    Attributes:
        failures: One for each rank that did not return, the first to fail first.
        rank: The rank that failed first.
    """

    def __init__(
        self, call: str, failures: Sequence[RankFailure], *, timeout_s: float | None = None
    ) -> None:
        self.failures = tuple(failures)
        headline = f"{call}: {_headline(self.failures, timeout_s)}"
        blocks = (failure.describe() for failure in self.failures)
        super().__init__("\n".join([headline, *blocks]), rank=self.failures[0].rank, operation=call)


def _headline(failures: Sequence[RankFailure], timeout_s: float | None) -> str:
    first = failures[0]
    if timeout_s is not None and all(f.outcome is Outcome.STOPPED for f in failures):
        names = ", ".join(str(f.rank) for f in failures)
        return f"not done within timeout_s={timeout_s:g}; still running: rank {names}"
    others = len(failures) - 1
    tail = f" (first of {others + 1} ranks that failed)" if others else ""
    return f"rank {first.rank}: {first.summary}{tail}"
