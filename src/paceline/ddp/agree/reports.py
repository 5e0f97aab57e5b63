"""A rank's account of its failure, as it goes to the other ranks."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class FailureKind(enum.Enum):
    """Why a step failed on a rank; the first of all ranks' kinds in this order is the error."""

    BACKWARD_RAISED = "backward raised"
    JOIN = "several steps under join"
    SHARED = "shared parameters"
    HOOK = "communication hook"
    GRAPH_CHANGED = "graph changed"
    READY_TWICE = "ready twice"
    GRADIENT_MISMATCH = "gradient mismatch"
    MISSING = "missing gradients"
    NONFINITE = "non-finite gradient"


@dataclass(frozen=True)
class FailureReport:
    """One rank's account of its failure.

    ``indices`` are the parameters' indices (as torch's messages give them), ``detail`` is a
    sentence that only that rank can say.
    """

    kind: FailureKind
    rank: int
    parameters: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return what goes over the wire."""
        return {
            "kind": self.kind.value,
            "rank": self.rank,
            "parameters": list(self.parameters),
            "indices": list(self.indices),
            "detail": self.detail,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FailureReport:
        """Rebuild a report from :meth:`to_json`."""
        return cls(
            FailureKind(data["kind"]),
            int(data["rank"]),
            tuple(str(name) for name in data["parameters"]),
            tuple(int(index) for index in data["indices"]),
            str(data["detail"]),
        )
