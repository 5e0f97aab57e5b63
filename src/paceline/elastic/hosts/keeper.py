"""Keeps a coordinator running: starts its process, and starts it again if it dies or hangs.

Used by :mod:`paceline.elastic.job`, on the first host. A new coordinator is started only after the
one before it has ended. Must not import torch.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable

from paceline.elastic.coordinator import CoordinatorOrder
from paceline.elastic.hosts.coordinator_process import run_coordinator
from paceline.elastic.protocol import receive
from paceline.errors import ConfigurationError
from paceline.launch.child import Child
from paceline.launch.exits import exit_summary
from paceline.launch.fork_server import ForkServer

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 5.0
_WELL_S = 30.0  # one that has lived so long may die without a pause
_MAX_DEATHS = 12  # in a row, each before that


class CoordinatorKeeper:
    """The process of a coordinator.

    Args:
        server: What it is forked from.
        order: What it is started with.
        selector: That the launcher waits on.
        warn: Shows a line to the user.
        give_up: Called if it dies again and again.
        is_over: Whether the job is; then a coordinator that ends well is not needed any more.
    """

    def __init__(
        self,
        server: ForkServer,
        order: CoordinatorOrder,
        selector: selectors.BaseSelector,
        warn: Callable[[str], None],
        give_up: Callable[[str], None],
        is_over: Callable[[], bool],
    ) -> None:
        self._server, self._order, self._selector, self._warn = server, order, selector, warn
        self._give_up, self._is_over = give_up, is_over
        self._deaths = 0
        self._child: Child | None = None
        self._has_listened = False
        self._pause_s = 0.0
        self._start_at_s: float | None = None
        self._started_s = 0.0
        self._why = ""
        self._start()

    @property
    def pid(self) -> int:
        """Of the present one; 0 if there is none."""
        return self._child.pid if self._child is not None else 0

    def _start(self) -> None:
        self._start_at_s, self._started_s = None, time.monotonic()
        self._child = child = self._server.fork()
        child.run(run_coordinator, self._order)
        assert child.pid
        self._selector.register(child.pipe, selectors.EVENT_READ, self._hear)
        self._selector.register(child.sentinel, selectors.EVENT_READ, self._on_sentinel)

    def _hear(self) -> None:
        assert self._child is not None
        try:
            message = receive(self._child.pipe)
        except (EOFError, OSError):
            self._selector.unregister(self._child.pipe)
            return
        if message["kind"] == "listening":
            self._has_listened = True
        elif not self._has_listened:
            where = self._order.address
            port = f"port {where[1]}" if where is not None else self._order.path
            raise ConfigurationError(f"{port} cannot be used for the job: {message['why']}")

    def _on_sentinel(self) -> None:
        child = self._child
        if child is None or child.wait(0.0) is None:
            return
        code = child.exit_code or 0
        self._let_go()
        if code == 0 and self._is_over():
            return
        if time.monotonic() - self._started_s >= _WELL_S:
            self._pause_s, self._deaths = 0.0, 0
        self._deaths += 1
        if self._deaths >= _MAX_DEATHS:
            self._give_up(
                f"the coordinator has {exit_summary(code)}, {self._deaths} times in a row"
            )
            return
        self._warn(f"the coordinator has {exit_summary(code)}{self._why}; it is started again")
        self._start_at_s = time.monotonic() + self._pause_s
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _MAX_PAUSE_S)
        self._why = ""

    def _let_go(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            for source in (child.pipe, child.sentinel):
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(source)
            child.close()

    def until_next_s(self) -> float | None:
        """Seconds until :meth:`tick` has something to do; None for never."""
        if self._start_at_s is None:
            return None
        return max(0.0, self._start_at_s - time.monotonic())

    def tick(self) -> None:
        """Start a new one if it is time."""
        if self._start_at_s is not None and time.monotonic() >= self._start_at_s:
            self._start()

    def kill(self, why: str) -> None:
        """End the present one; another is started once it has ended."""
        if self._child is not None and not self._why:
            self._why = f", because {why}"
            self._child.kill()

    def close(self) -> None:
        """End it for good."""
        self._start_at_s = None
        self._let_go()
