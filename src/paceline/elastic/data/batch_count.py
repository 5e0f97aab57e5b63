"""How many global batches a step was made of, as far as reductions tell.

Used by :mod:`paceline.elastic.state` where the script does not say it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from paceline.ddp import DistributedDataParallel

logger = logging.getLogger("paceline.elastic")

_MANY = (
    "a step with %d reductions was committed, so the sampler has moved by %d global batches. If it "
    "had another number of batches, say so: state.commit(batches=1)"
)


class BatchCount:
    """Counts reductions since the last commit. It means something if there is one wrapper only.

    Args:
        wrappers: Of all models that are trained.
    """

    def __init__(self, wrappers: Sequence[DistributedDataParallel]) -> None:
        reducers = [each.reducer for each in wrappers if each.reducer is not None]
        self._counters = reducers[0].counters if len(reducers) == 1 else None
        self._has_warned = False
        self.restart()

    def restart(self) -> None:
        """What was reduced so far does not count."""
        self._seen = 0 if self._counters is None else self._counters.steps

    def take(self) -> int:
        """Return how many batches the step had that ends now."""
        if self._counters is None:
            return 1
        steps = self._counters.steps
        batches, self._seen = steps - self._seen, steps
        if batches > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(_MANY, batches, batches)
        return batches
