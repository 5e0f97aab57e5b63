"""The line that the log gets about a wait that takes long: the same for all waits of Paceline.

Called by :mod:`paceline.liveness.wait_guard` (over a process group) and by
:mod:`paceline.shm.diagnose.wait_monitor` (in shared memory), which know who is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("paceline")

LOG_AFTER_S = 10.0
"""A wait is on the log after this long, then after twice as long, and so on."""


class WaitLog:
    """What the log is told about one wait.

    Attributes:
        next_s: After how long a wait it is told next.
    """

    def __init__(self) -> None:
        self.next_s = LOG_AFTER_S

    def tell(self, rank: int, what: str, waited_s: float, describe: Callable[[], str]) -> None:
        """Log that a rank waits in ``what``, and whom for, if that is due."""
        if waited_s < self.next_s:
            return
        self.next_s *= 2
        logger.warning("Rank %d has waited for %.0f s in %s%s", rank, waited_s, what, describe())
