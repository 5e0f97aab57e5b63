"""Whether the epoch of this process is over, for those that wait in a store.

Set by :mod:`paceline.elastic.session`, asked by the stores. A rank that makes a group waits in a
store for the others. If one of them has died, nothing wakes it there: no connection ends.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

_is_over: Callable[[], bool] | None = None


def watch_epoch(is_over: Callable[[], bool] | None) -> None:
    """Say how to find out; None: there are no epochs any more."""
    global _is_over
    _is_over = is_over


def check_epoch() -> None:
    """Raise if there is nobody left to wait for.

    Raises:
        torch.distributed.DistStoreError: The epoch is over.
    """
    if _is_over is not None and _is_over():
        raise dist.DistStoreError("the epoch is over: ranks have died, or are to join or to leave")
