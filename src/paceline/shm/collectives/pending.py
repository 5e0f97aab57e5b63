"""A collective under way: what :class:`~paceline.shm.collectives.group.SharedGroup` hands out."""

from __future__ import annotations

from _thread import RLock  # that of threading is a function of Python's, and takes twice as long
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from paceline.errors import CollectiveError
from paceline.native.extension import native

FORKED = -1
"""A status beside the core's: this process is a child of the one that began the operation."""
Explain = Callable[["Pending", int], CollectiveError]


class InFlight(Protocol):
    """A collective under way, on one host or over several."""

    def wait(self, timeout_s: float = ...) -> None:
        """Block until the results are in the tensors.

        Raises:
            CollectiveError: If it failed, or did not end within ``timeout_s``.
        """

    def is_done(self) -> bool:
        """Say whether :meth:`wait` would wait for no other rank. Never blocks."""

    def try_finish(self) -> bool:
        """If it is done, bring the results to the tensors; say whether it is.

        Waits for no rank, but copies, or waits for a thread that does.
        """

    def done_ns(self) -> int:
        """When it ended, as ``time.perf_counter_ns`` counts; 0 before."""


class Pending:
    """One collective. Holds its tensors until it is done: the native core writes to them."""

    __slots__ = ("_copies", "_explain", "_lock", "_tensors", "operation")

    def __init__(
        self,
        operation: Any,
        tensors: Any,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        explain: Explain,
    ) -> None:
        self.operation = operation
        self._tensors = tensors
        self._copies = copies
        self._explain = explain
        self._lock = RLock()

    def is_done(self) -> bool:
        """See :class:`InFlight`."""
        return bool(self.operation.status() != native.STATUS_PENDING)

    def try_finish(self) -> bool:
        """See :class:`InFlight`."""
        status = self.operation.status()
        if status == native.STATUS_OK:
            self._finish()
        return bool(status != native.STATUS_PENDING)

    def done_ns(self) -> int:
        """See :class:`InFlight`."""
        return int(self.operation.ended_ns()) if self.is_done() else 0

    def wait(self, timeout_s: float = -1.0) -> None:
        """See :class:`InFlight`. For ever, by default: the operation has a deadline."""
        status = self.operation.status()
        if status == native.STATUS_PENDING:
            try:
                status = self.operation.wait(timeout_s)
            except native.ForkedError:
                raise self._explain(self, FORKED) from None
        if status != native.STATUS_OK:
            raise self._explain(self, status)
        self._finish()

    def _finish(self) -> None:
        """Bring results to tensors that the core could not write to itself; let go of all. Once.

        Whoever comes meanwhile waits for the copies, too.
        """
        if self._copies:
            with self._lock, torch.no_grad():  # a target may be a parameter
                for target, source in self._copies:
                    target.copy_(source)
                self._copies = ()
        self._tensors = None
