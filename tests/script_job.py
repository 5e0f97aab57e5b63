"""A script under the launcher's own loop, on the fork server that all tests share."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from paceline.launch.fork_server import ForkServer, shared_fork_server
from paceline.launch.job import Job, JobPlan
from paceline.launch.rendezvous import Endpoint, JobHosts
from paceline.launch.screen import Screen
from paceline.launch.target import Target, TargetKind
from paceline.observe.run_folder import RunFolder

DEADLINE_S = 240.0


class ScriptJob(Job):
    """As ``paceline run`` has it, but for the process that ranks are forked from."""

    def _served(self) -> contextlib.AbstractContextManager[ForkServer]:
        self.deadline_s = time.monotonic() + DEADLINE_S
        return contextlib.nullcontext(shared_fork_server())

    def _wait_once(self, limit_s: float | None = None) -> None:
        super()._wait_once(1.0 if limit_s is None else min(limit_s, 1.0))
        for rank in self._ranks if time.monotonic() > self.deadline_s else []:
            rank.child.kill()


def run_script(script: Path, tmp_path: Path, ranks: int = 2) -> str:
    """Run it to its end; returns what rank 0 has written."""
    folder = RunFolder.create(script.name, tmp_path / "run")
    plan = JobPlan(
        Target(TargetKind.SCRIPT, str(script), ()),
        JobHosts(1, 0, ranks, Endpoint()),
        "test",
        options={"OMP_NUM_THREADS": "1"},
        shown=frozenset(),
    )
    with Screen() as screen:
        code = ScriptJob(plan, folder, screen).run()
    logs = [folder.path / f"rank{rank}.log" for rank in range(ranks)]
    assert code == 0, "\n".join(log.read_text() for log in logs)
    return logs[0].read_text()
