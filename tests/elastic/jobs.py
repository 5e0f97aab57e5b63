"""Elastic jobs in tests: the launcher's own loop, on the fork server that all tests share."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.elastic.job import ElasticJob, ElasticPlan
from paceline.elastic.members import ElasticPolicy
from paceline.elastic.stuck import StuckWatch, least_far
from paceline.errors import RecordsError
from paceline.launch.fork_server import ForkServer, shared_fork_server
from paceline.launch.job import JobPlan
from paceline.launch.rendezvous import Endpoint, JobHosts
from paceline.launch.screen import Screen
from paceline.launch.target import Target, TargetKind
from paceline.observe.ring import read_status
from paceline.observe.run_folder import RunFolder

SCRIPT = Path(__file__).parent / "script.py"
DEADLINE_S = 240.0
HURRY = "hurry"  # this file among the results ends the pauses
SAMPLES, BATCH = 240, 24

Fault = tuple[str, str, int, int]
"""What, at which point, from which step on, in which rank (-1: whichever comes first)."""


class JobOnSharedServer(ElasticJob):
    """As ``paceline run --elastic`` has it, but for the process that ranks are forked from."""

    on_wait: Callable[[JobOnSharedServer], None] | None = None
    hurries: Callable[[list[int]], bool] | None = None
    is_late = False
    once_stuck_after_s = 0.0

    def _served(self) -> contextlib.AbstractContextManager[ForkServer]:
        self.deadline_s = time.monotonic() + DEADLINE_S
        return contextlib.nullcontext(shared_fork_server())

    def _wait_once(self, limit_s: float | None = None) -> None:
        super()._wait_once(0.1 if limit_s is None else min(limit_s, 0.1))
        if self.on_wait is not None:
            self.on_wait(self)
        if self.hurries is not None and self.hurries(self.worlds()):
            self.hurries = None
            Path(self._plan.target.args[0], HURRY).touch()
        if self.once_stuck_after_s:
            self._watch_stuck()
        if time.monotonic() > self.deadline_s and not self.is_late:
            self.is_late = True
            self.fail("the test took too long")

    def _watch_stuck(self) -> None:
        """Judge who is stuck while one rank has its fault and is behind all others.

        So no rank is killed that is only slow.
        """
        if self._kill_reasons:
            self.once_stuck_after_s = 0.0
        has_fired = any(Path(self._plan.target.args[0]).glob("fired-*"))
        is_sure = has_fired and len(least_far(self._progress())) == 1
        after_s = self.once_stuck_after_s if is_sure else 0.0
        if bool(after_s) != (self._stuck.until_next_s() is not None):
            self._stuck = StuckWatch(self._folder, after_s)

    def _progress(self) -> dict[int, tuple[int, int] | None]:
        members = self._agent.members.values() if self._agent is not None else ()
        return {each.id: self._progress_of(each.slot) for each in members}

    def _progress_of(self, slot: int) -> tuple[int, int] | None:
        try:
            status = read_status(self._folder.events(slot))
        except (OSError, RecordsError):
            return None
        return status.step, status.activity

    def worlds(self) -> list[int]:
        """Of how many ranks the job has been so far, one number for each time they have met."""
        found = self._folder.membership
        lines = found.read_text().split("\n")[:-1] if found.exists() else []  # whole ones
        return [json.loads(line)["world"] for line in lines]


@dataclass(frozen=True)
class Ended:
    """How a job of a test ended."""

    code: int
    out: Path
    folder: RunFolder

    def results(self) -> list[dict[str, Any]]:
        """Of the ranks that were there at the end."""
        return [json.loads(path.read_text()) for path in self.out.glob("done-*")]

    def fired(self) -> int:
        return len(list(self.out.glob("fired-*")))

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.folder.membership.read_text().splitlines()]

    def logs(self) -> str:
        paths = [*self.folder.path.glob("*.log"), *self.folder.path.glob("failure.txt")]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in paths)


def run_job(
    tmp_path: Path,
    *,
    ranks: int = 3,
    steps: int = 20,
    faults: Sequence[Fault] = (),
    stuck_after_s: float = 0.0,
    once_stuck_after_s: float = 0.0,
    lease_s: float = 15.0,
    pause_s: float = 0.0,
    hurries: Callable[[list[int]], bool] | None = None,
    backend: str = "gloo",
    on_wait: Callable[[JobOnSharedServer], None] | None = None,
    options: dict[str, Any] | None = None,
    shutdown_s: float = 3.0,
    **policy: Any,
) -> Ended:
    """Train ``script.py`` as an elastic job; returns when it is over.

    Args:
        pause_s: After each step: others come and go meanwhile.
        hurries: Whether there need be no more pauses, by the numbers of ranks so far.
        once_stuck_after_s: The same as ``stuck_after_s``, but for the first fault only.
        options: For the script; everything that is not named here is for the policy.
        shutdown_s: From SIGTERM to SIGKILL.
    """
    out = tmp_path / "out"
    out.mkdir()
    folder = RunFolder.create("script.py", tmp_path / "run")
    order = {"steps": steps, "faults": faults, "pause_s": pause_s, "backend": backend}
    order |= options or {}
    plan = JobPlan(
        Target(TargetKind.SCRIPT, str(SCRIPT), (str(out), json.dumps(order))),
        JobHosts(1, 0, ranks, Endpoint()),
        "test",
        options={"OMP_NUM_THREADS": "1"},
        shown=frozenset(),
        shutdown_s=shutdown_s,
    )
    elastic = ElasticPlan(ElasticPolicy(ranks, **policy), 8, stuck_after_s, lease_s)
    with Screen() as screen:
        job = JobOnSharedServer(plan, folder, screen, elastic)
        job.on_wait, job.hurries = on_wait, hurries
        job.once_stuck_after_s = once_stuck_after_s
        return Ended(job.run(), out, folder)


def check(
    ended: Ended,
    *,
    faults: int,
    world: int,
    steps: int | None = 20,
    differing: Sequence[str] = (),
) -> None:
    """The job went on to its end, and all ranks held the same bits after every commit.

    Args:
        ended: The job.
        faults: How many must have fired.
        world: How many ranks are there at the end.
        steps: How many are committed; None: as many as the ranks say.
        differing: Parts that each rank has for itself.
    """
    assert ended.code == 0, ended.logs()
    assert ended.fired() == faults, f"{ended.fired()} faults fired\n{ended.logs()}"
    results = ended.results()
    assert [each["world"] for each in results] == [world] * world, ended.logs()
    done = {each["step"] for each in results}
    assert len(done) == 1 if steps is None else done == {steps}
    for part in results[0]["digests"].keys() - set(differing):
        assert len({each["digests"][part] for each in results}) == 1, part
    check_commits(ended, *done, differing)
    check_samples(ended, *done)


def check_commits(ended: Ended, steps: int, differing: Sequence[str]) -> None:
    """No step was committed twice by a rank, and whoever committed it had the same bits."""
    found: dict[int, dict[str, set[str]]] = {}
    for path in ended.out.glob("digests-*"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        numbers = [step for step, _ in lines]
        assert numbers == sorted(set(numbers)), f"{path.name}: {numbers}"
        for step, digests in lines:
            for part, digest in digests.items():
                found.setdefault(step, {}).setdefault(part, set()).add(digest)
    for step, parts in found.items():
        differ = {part for part, digests in parts.items() if len(digests) > 1} - set(differing)
        assert not differ, f"ranks differ in {differ} after step {step}\n{ended.logs()}"
    # A commit after which ranks regroup is noted by nobody; the last may be such a one.
    assert not found or max(found) >= steps - 1


def check_samples(ended: Ended, steps: int) -> None:
    """Every step was trained on its global batch, and an epoch is all samples, each once."""
    batches: dict[int, dict[str, Any]] = {}
    for path in ended.out.glob("seen-*"):
        for line in path.read_text().splitlines():
            step, epoch, position, indices = json.loads(line)
            found = batches.setdefault(step, {"places": set(), "parts": set()})
            found["places"].add((epoch, position))
            found["parts"].add(tuple(indices))
    assert sorted(batches) == list(range(1, steps + 1))
    for number, batch in batches.items():
        per_epoch = SAMPLES // BATCH
        assert batch["places"] == {((number - 1) // per_epoch, (number - 1) % per_epoch)}
    for first in range(1, steps - SAMPLES // BATCH + 2, SAMPLES // BATCH):
        parts = [batches[n]["parts"] for n in range(first, first + SAMPLES // BATCH)]
        samples = {index for part in parts for piece in part for index in piece}
        assert samples == set(range(SAMPLES))
