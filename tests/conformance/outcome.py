"""What the two ends of the test server say to each other. Light: pytest imports it too."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+$", re.MULTILINE)
# torch wraps the error of a rank in one of its own, which says nothing new.
_WRAPPER = "exited with error code"


@dataclass(frozen=True)
class Request:
    """One test to run.

    Attributes:
        name: the method.
        test_class: torch's class that has it.
        world_size: the number of ranks.
        deadline_s: when torch gives up on the ranks and shows where they are.
        defaults: keyword arguments that the class under test gets where the test gives none.
    """

    name: str
    test_class: str
    world_size: int
    deadline_s: int
    defaults: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What became of a test.

    Attributes:
        status: one of the three above.
        detail: the text that explains it (tracebacks and output, or a reason).
        wrappers: the full name of the class behind every wrapper that a rank has made.
    """

    status: str
    detail: str = ""
    wrappers: list[str] = field(default_factory=list)

    @property
    def cause(self) -> str:
        """The first error of a rank, in one line."""
        errors = (found for found in _ERROR_LINE.findall(self.detail) if _WRAPPER not in found)
        return next(errors, self.detail.strip().partition("\n")[0])
