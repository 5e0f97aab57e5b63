"""A collective under way: what :class:`~paceline.shm.collectives.group.SharedGroup` hands out."""

from __future__ import annotations

from _thread import RLock  # that of threading is a function of Python's, and takes twice as long
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.errors import CollectiveError
from paceline.native.extension import native

FORKED = -1
"""A status beside the core's: this process is a child of the one that began the operation."""
Judge = Callable[["Pending", int], CollectiveError]


class Pending:
    """One collective. Holds its tensors until it is done: the native core writes to them."""

    __slots__ = ("_copies", "_judge", "_lock", "_tensors", "operation")

    def __init__(
        self,
        operation: Any,
        tensors: Any,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        judge: Judge,
    ) -> None:
        self.operation = operation
        self._tensors = tensors
        self._copies = copies
        self._judge = judge
        self._lock = RLock()

    def is_done(self) -> bool:
        """Say whether :meth:`wait` would return at once. If it ended well, the results are there.

        Never blocks.
        """
        status = self.operation.status()
        if status == native.STATUS_OK:
            self._settle()
        return bool(status != native.STATUS_PENDING)

    def done_ns(self) -> int:
        """When it ended, as ``time.perf_counter_ns`` counts; 0 before."""
        return int(self.operation.ended_ns()) if self.is_done() else 0

    def wait(self, timeout_s: float = -1.0) -> None:
        """Block until the results are there; for ever, by default: the operation has a deadline.

        Raises:
            CollectiveError: If it failed, or did not end within ``timeout_s``.
        """
        status = self.operation.status()
        if status == native.STATUS_PENDING:
            try:
                status = self.operation.wait(timeout_s)
            except native.ForkedError:
                raise self._judge(self, FORKED) from None
        if status != native.STATUS_OK:
            raise self._judge(self, status)
        self._settle()

    def _settle(self) -> None:
        """Bring results to tensors that the core could not write to itself; let go of all. Once.

        Whoever comes meanwhile waits for the copies, too.
        """
        if self._copies:
            with self._lock, torch.no_grad():  # a target may be a parameter
                for target, source in self._copies:
                    target.copy_(source)
                self._copies = ()
        self._tensors = None
