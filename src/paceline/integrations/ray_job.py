"""The membership of one elastic Ray job: agent and coordinator, in two threads of Ray's controller.

Used by :mod:`paceline.integrations.ray_elastic`. Ray starts workers and replaces those that are
gone; who trains when is decided here, as in ``paceline run --elastic``. Must not import torch.

[Note: whose workers]
The coordinator asks for a member in each slot, and Ray has a worker for each rank: the slot is the
rank. A worker becomes the member that its slot waits for. A member is dead when the kernel says
that its process has ended, and never before: nobody goes on beside one that may still write.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.elastic.coordinator import Coordinator, CoordinatorOrder
from paceline.elastic.events import MembershipEvent
from paceline.elastic.handshake import KEY_BYTES
from paceline.elastic.hosts.agent import Agent, AgentPlan
from paceline.elastic.hosts.mailbox import Mailbox
from paceline.elastic.members import ElasticPolicy
from paceline.elastic.protocol import DIRECTORY, MEMBER, coordinator_path
from paceline.errors import MembershipError

logger = logging.getLogger("paceline.elastic")

_ORDER_S = 120.0  # for the coordinator to ask for a member


@dataclass
class _Worker:
    """A process of Ray that is a member."""

    slot: int
    pid: int
    handle: int  # a descriptor of the process: its number cannot be taken by another
    killed_because: str = ""


@dataclass(frozen=True)
class Place:
    """What a worker is told.

    Attributes:
        environ: For :class:`~paceline.elastic.client.CoordinatorClient`.
        meeting: The file of its first group, in which it is alone.
    """

    environ: dict[str, str]
    meeting: Path


class RayJob:
    """Who trains in one job of Ray's.

    Args:
        policy: What the coordinator decides by.
    """

    def __init__(self, policy: ElasticPolicy) -> None:
        self._orders: dict[int, dict[str, Any]] = {}
        self._workers: dict[int, _Worker] = {}
        self._news = threading.Condition()
        self._outcome: str | None = None
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        self._mailbox = Mailbox(self._selector)
        key = os.urandom(KEY_BYTES).hex().encode()
        self._agent = Agent(AgentPlan(0, 1, policy.ranks, key), self, self._selector)
        path = coordinator_path(self._agent.directory)
        # Ray replaces workers one by one: none may wait for another before it is complete.
        policy = replace(policy, begins_alone=True)
        self._coordinator = Coordinator(CoordinatorOrder(policy, key, path))
        self._threads = [
            threading.Thread(target=run, name="paceline-ray", daemon=True)
            for run in (self._coordinate, self._run)
        ]
        for thread in self._threads:
            thread.start()

    # --- called by Ray's controller ---------------------------------------------------------------
    def take(self, slot: int, pid: int) -> Place:
        """Make a worker the member that its slot waits for.

        Raises:
            MembershipError: The job is over, or the coordinator wants nobody there.
        """
        until_s = time.monotonic() + _ORDER_S
        with self._news:
            while self._outcome is not None or slot not in self._orders:
                if self._outcome is not None:
                    raise MembershipError(f"the job is over: {self._outcome or 'it is complete'}")
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise MembershipError(f"nobody is wanted in the place of rank {slot}")
                self._news.wait(left_s)
            order = self._orders.pop(slot)
        member = int(order["member"])
        self._mailbox.post(partial(self._watch, member, slot, pid))
        directory = self._agent.directory
        environ = {DIRECTORY: str(directory), MEMBER: str(member), "RANK": "0", "WORLD_SIZE": "1"}
        return Place(environ, directory / f"alone-{member}")

    def close(self) -> None:
        """End all conversations. Idempotent."""
        if self._is_closed:
            return
        self._mailbox.post(self._stop)
        for thread in reversed(self._threads):
            thread.join()
        for worker in self._workers.values():
            os.close(worker.handle)
        self._agent.close()
        self._mailbox.close()
        self._selector.close()

    # --- the threads ------------------------------------------------------------------------------
    def _coordinate(self) -> None:
        try:
            self._coordinator.run()
        finally:
            self._coordinator.close()
            self._mailbox.post(self._on_coordinator_gone)

    def _on_coordinator_gone(self) -> None:
        self._agent.on_refused("its coordinator has failed")  # not, if the job is over
        self._agent.is_over = True

    def _run(self) -> None:
        while not (self._is_closed and self._agent.is_over):
            for key, _ in self._selector.select(self._agent.until_next_s()):
                if self._selector.get_map().get(key.fd) == key:
                    key.data()
            self._agent.tick()
            self._judge()

    def _judge(self) -> None:
        outcome = self._agent.outcome
        if outcome is None or self._outcome is not None:
            return
        with self._news:
            self._outcome = outcome
            self._news.notify_all()
        if outcome and not self._is_closed:
            logger.error("the job ends: %s", outcome)
            for member in list(self._workers):
                self.kill(member, outcome)
        self._agent.say("finished")

    def _stop(self) -> None:
        self._is_closed = True
        if self._agent.outcome is None:
            self._agent.say("stop", why="Ray has ended the job")

    def _watch(self, member: int, slot: int, pid: int) -> None:
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            self._agent.on_exit(member, f"rank {slot} (pid {pid}) ended", is_quiet=False)
            return
        self._workers[member] = _Worker(slot, pid, handle)
        self._selector.register(handle, selectors.EVENT_READ, partial(self._on_ended, member))
        if self._outcome:  # it was on its way
            self.kill(member, self._outcome)

    def _on_ended(self, member: int) -> None:
        worker = self._workers.pop(member)
        self._selector.unregister(worker.handle)
        os.close(worker.handle)
        why = f"rank {worker.slot} (pid {worker.pid}) ended"
        if worker.killed_because:
            why = f"rank {worker.slot} (pid {worker.pid}) was killed: {worker.killed_because}"
        self._agent.on_exit(member, why, is_quiet=False)

    # --- what the agent asks for: paceline.elastic.hosts.agent.Launcher ---------------------------
    def fork(self, order: dict[str, Any]) -> None:
        """Take the next worker that Ray has for this slot."""
        with self._news:
            self._orders[int(order["slot"])] = order
            self._news.notify_all()

    def kill(self, member: int, why: str, *, at_once: bool = False) -> None:
        """Kill a member's process; Ray replaces it."""
        worker = self._workers.get(member)
        if worker is not None and not worker.killed_because:
            worker.killed_because = why
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.handle, signal.SIGKILL)

    def pid_of(self, member: int) -> int:
        """A member's process; 0 if it has none yet."""
        worker = self._workers.get(member)
        return worker.pid if worker is not None else 0

    def on_epoch(self, event: dict[str, Any]) -> None:
        """Say that ranks train."""
        logger.info("%s", MembershipEvent(**event).describe())

    def on_store(self, store_port: int) -> None:
        """Ranks meet in files."""

    def listens(self) -> list[str]:
        """No other host asks."""
        return []
