"""Keeps an elastic job together whose ranks ``paceline run`` has not started: a process of its own.

Started by the first rank (:mod:`paceline.elastic.supervised.supervise`). To ranks it is what a
launcher is: an agent, with the coordinator in a thread, and the same protocol. But it has started
no rank, and replaces none. All ranks are on this host. Must not import torch.

[Note: a supervisor's life]
- **Who starts it**: rank 0, once all ranks have come to ``train(state)``. They tell each other
  their processes over the group that they have, and rank 0 tells the others where it is.
- **Who is its parent**: nobody. It has left the process that started it, its session and its
  process group: what ends a rank, or a terminal's Ctrl-C, does not end it.
- **How deaths are noticed**: by a pidfd of each rank, opened while the rank waits for its place in
  the first epoch, and compared with the time at which that process began.
- **How ranks are fenced**: SIGKILL to the pidfd. A rank counts as dead when its pidfd says so.
- **How it ends**: with the last rank, or when the job is over and all have hung up. If it is
  killed, ranks go on until one dies; what they wait for then is an error that says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.elastic.coordinator import Coordinator, CoordinatorOrder
from paceline.elastic.hosts.agent import Agent, AgentPlan
from paceline.elastic.members import ElasticPolicy, MemberState
from paceline.elastic.protocol import coordinator_path
from paceline.elastic.stuck import StuckWatch, Watched, where_it_is
from paceline.elastic.supervised.outcome import OutcomeFile
from paceline.launch.kernel import set_process_name
from paceline.observe.run_folder import RUN_DIR, RunFolder
from paceline.processes import open_pidfd

STUCK_AFTER = "PACELINE_ELASTIC_STUCK_AFTER"
"""The environment variable with what ``--stuck-after`` is under ``paceline run``."""
_STUCK_AFTER_S = 300.0
_WAIT_S = 0.5


@dataclass
class _Process:
    """A rank, as its supervisor sees it."""

    pid: int
    pidfd: int | None  # None: it has ended
    kill_reason: str = ""


class Supervisor:
    """See the module."""

    def __init__(self, ranks: list[_Process], stuck_after_s: float) -> None:
        self._selector = selectors.DefaultSelector()
        self._processes = ranks
        self._agent = Agent(AgentPlan(0, 1, len(ranks)), self, self._selector)
        self._outcome = OutcomeFile(self._agent.directory)
        policy = ElasticPolicy(len(ranks), replaces=False)
        path = coordinator_path(self._agent.directory)
        self._coordinator = Coordinator(CoordinatorOrder(policy, self._agent.key, path))
        self._thread = threading.Thread(target=self._coordinate, name="coordinator", daemon=True)
        folder = RunFolder(os.environ.get(RUN_DIR) or self._agent.directory)
        self._folder = folder
        self._stuck = StuckWatch(folder, stuck_after_s)
        self._forked = 0
        self._is_broken = self._has_failed = self._has_told = False
        self._thread.start()

    def _coordinate(self) -> None:
        try:
            self._coordinator.run()
        finally:
            self._is_broken = not self._coordinator._is_over

    @property
    def directory(self) -> Path:
        """Where ranks reach it."""
        return self._agent.directory

    def wait_ready(self) -> None:
        """Until all ranks are expected."""
        while self._forked < len(self._processes) and not self._is_broken:
            self._wait_once()

    def run(self) -> None:
        """Until the job is over, or all ranks are."""
        while not self._is_broken and self._is_needed():
            self._wait_once()

    def _is_needed(self) -> bool:
        if all(each.pidfd is None for each in self._processes):
            return False
        return self._agent.outcome is None or self._agent.ranks.are_there()

    def _wait_once(self) -> None:
        waits = [self._agent.until_next_s(), self._stuck.until_next_s(), _WAIT_S]
        for key, _ in self._selector.select(min(w for w in waits if w is not None)):
            if self._selector.get_map().get(key.fd) == key:
                key.data()
        self._agent.tick()
        self._kill_stuck()
        if self._agent.outcome and not self._has_failed:
            self._has_failed = True
            self._agent.ranks.say_to_all("failed", why=self._agent.outcome)
        if self._agent.outcome is not None and not self._has_told:
            self._has_told = True
            self._agent.say("finished")

    def _kill_stuck(self) -> None:
        if not self._stuck.is_due():
            return
        found = [
            Watched(each.id, each.slot, self.pid_of(each.id), MemberState(each.state),
                    self._agent.ranks.silent_s(each.id))
            for each in self._agent.members.values()
        ]  # fmt: skip
        for member, why in self._stuck.judge(found).items():
            self.kill(member, why)
        self._agent.ranks.ping()

    # --- what the agent asks for: a member's number is that of its rank at the beginning ----------
    def fork(self, order: dict[str, Any]) -> None:
        """Expect a rank, which runs already."""
        member = int(order["member"])
        self._forked += 1
        process = self._processes[member]
        if process.pidfd is None:
            self._on_end(member)
        else:
            self._selector.register(
                process.pidfd, selectors.EVENT_READ, partial(self._on_end, member)
            )

    def kill(self, member: int, why: str, *, at_once: bool = False) -> None:
        """Kill a rank; the coordinator hears of its end later: [Note: fencing] in job.py."""
        process = self._processes[member]
        if process.pidfd is None or process.kill_reason:
            return
        place = "" if at_once else where_it_is(self._folder, member, process.pid)[0]
        process.kill_reason = f"{why}, at {place}" if place else why
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)

    def _on_end(self, member: int) -> None:
        process = self._processes[member]
        if process.pidfd is not None:
            self._selector.unregister(process.pidfd)
            os.close(process.pidfd)
            process.pidfd = None
        why = f"was killed: {process.kill_reason}" if process.kill_reason else "ended"
        self._agent.on_exit(member, f"rank {member} (pid {process.pid}) {why}", is_quiet=False)

    def pid_of(self, member: int) -> int:
        """Its process."""
        return self._processes[member].pid

    def on_epoch(self, event: dict[str, Any]) -> None:
        """The ranks log it."""

    def on_store(self, store_port: int) -> None:
        """There is one host."""

    def listens(self) -> list[str]:
        """There is one host."""
        return []

    def close(self) -> None:
        """Remove what there is of it."""
        self._outcome.close(is_well=self._agent.outcome == "")
        self._agent.close()
        self._thread.join(_WAIT_S)
        self._selector.close()


def main() -> int:
    """Leave whoever started this process; then supervise the ranks that stdin names."""
    order = json.loads(sys.stdin.buffer.readline())
    os.setsid()
    if os.fork():
        os._exit(0)
    set_process_name("paceline-elastic")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with its ranks
    ranks = [
        _Process(int(pid), open_pidfd(int(pid), int(started))) for pid, started in order["ranks"]
    ]
    supervisor = Supervisor(ranks, float(os.environ.get(STUCK_AFTER) or _STUCK_AFTER_S))
    try:
        supervisor.wait_ready()
        os.write(1, json.dumps({"directory": str(supervisor.directory)}).encode() + b"\n")
        with Path(os.devnull).open("r+b") as null:
            os.dup2(null.fileno(), 0)
            os.dup2(null.fileno(), 1)  # who started it waits for no end of file
        supervisor.run()
    finally:
        supervisor.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
