"""Waits for the futures of hooks, no longer than the group's time-out.

``torch.futures.Future.wait`` has no time-out: a hook that forgets to complete its future would stop
the rank for ever. Made by :mod:`paceline.ddp.agree.peers`, used by
:mod:`paceline.ddp.reduce.launch`. A rank gives up a little before the group's time-out, so that the
peers, who wait for it in the exchange that follows, are told why.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from paceline.liveness import Watch

MARGIN_S = 5.0
MARGIN = 0.1


class HookFutures:
    """Waits for the futures that the hooks of one step returned, for one time-out together."""

    def __init__(self, watch: Watch, timeout_s: float) -> None:
        self._watch = watch
        self._timeout_s = timeout_s - min(MARGIN_S, MARGIN * timeout_s)
        self._deadline_s: float | None = None

    def begin(self) -> None:
        """A step begins: the first wait for a future starts the clock."""
        self._deadline_s = None

    def wait(self, future: torch.futures.Future[Any], what: str) -> None:
        """Block until a future is done.

        Raises:
            TimeoutError: If it is not, in time.
            PeerLostError: A rank has died, and it is not done soon after.
            Exception: What the future holds instead of a value.
        """
        if not (future.done() or self._watch.wait_future(what, future, self._left_s())):
            raise TimeoutError(
                f"{what} did not complete within {self._timeout_s:.3g} s (the time-out of the "
                "group, less a margin to tell the other ranks). Every future that a hook "
                "returns has to be completed: set_result(tensor) or set_exception(error)."
            )
        future.wait()

    def _left_s(self) -> float:
        now_s = time.monotonic()
        if self._deadline_s is None:
            self._deadline_s = now_s + self._timeout_s
        return max(0.0, self._deadline_s - now_s)
