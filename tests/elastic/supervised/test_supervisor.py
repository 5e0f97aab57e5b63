"""Elastic training without ``paceline run``: survivors go on, under whatever started them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp

from paceline.elastic.supervised.supervisor import STUCK_AFTER
from paceline.launch.fork_server import shared_fork_server
from paceline.launch.script import read_raised, run_rank
from paceline.launch.target import Target, TargetKind
from paceline.observe.run_folder import RunFolder
from tests.elastic.jobs import SCRIPT, Ended, Fault, check
from tests.system import free_port

DEADLINE_S = 200.0
pytestmark = pytest.mark.timeout(300)


def rank_environ(ranks: int, port: int, rank: int, tmp_path: Path) -> dict[str, str]:
    own = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(temporary(tmp_path)),
    }
    return {name: str(value) for name, value in (own | common).items()}


def run_ranks_of_nobody(
    tmp_path: Path, *, faults: Sequence[Fault] = (), ranks: int = 3, **options: Any
) -> tuple[Ended, list[int]]:
    """Train ``script.py`` on ranks that nobody looks after; returns their exit codes, too."""
    out = tmp_path / "out"
    for each in (out, tmp_path / "logs"):
        each.mkdir()
    order = {"steps": 20, "faults": faults, **options}
    target = Target(TargetKind.SCRIPT, str(SCRIPT), (str(out), json.dumps(order)))
    port = free_port()
    children = []
    for rank in range(ranks):
        with (tmp_path / "logs" / f"rank{rank}.log").open("wb") as log:
            streams = (0, log.fileno(), log.fileno())
            child = shared_fork_server().fork(streams=streams)
        environ = {**os.environ, **rank_environ(ranks, port, rank, tmp_path)}
        child.run(run_rank, target, rank, environ | options.get("environ", {}))
        children.append(child)
    until_s = time.monotonic() + DEADLINE_S
    codes = [child.wait(max(0.0, until_s - time.monotonic())) for child in children]
    for rank, child in enumerate(children):
        child.kill()
        raised = read_raised(child.pipe)
        with (tmp_path / "logs" / f"rank{rank}.log").open("a") as log:  # the launcher does it else
            log.write(raised.traceback if raised is not None else "")
        child.close()
    wait_gone(tmp_path)
    ended = Ended(0, out, RunFolder(tmp_path / "logs"))
    return ended, [-1 if code is None else code for code in codes]


def temporary(tmp_path: Path) -> Path:
    """A temporary folder with a name that is short enough for sockets."""
    link = tmp_path / "tmp"
    if not link.exists():
        link.symlink_to(tempfile.mkdtemp())
    return link.resolve()


def wait_gone(tmp_path: Path) -> None:
    """Until the supervisor has ended: it removes its directory."""
    until_s = time.monotonic() + 60
    folder = temporary(tmp_path)
    while list(folder.glob("paceline-elastic-*")):
        assert time.monotonic() < until_s, "the supervisor has not ended"
        time.sleep(0.02)
    shutil.rmtree(folder)  # torch leaves files there


KILLED = -signal.SIGKILL
STAND_IN = ("-m", "paceline.elastic.stand_in")


@pytest.mark.slow
def test_undisturbed(tmp_path: Path) -> None:
    ended, codes = run_ranks_of_nobody(tmp_path)
    assert codes == [0, 0, 0], ended.logs()
    check(ended, faults=0, world=3)


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), "paceline"])
def test_a_rank_dies_in_the_backward(tmp_path: Path, backend: str) -> None:
    ended, codes = run_ranks_of_nobody(tmp_path, faults=[("kill", "bucket", 5, 1)], backend=backend)
    assert codes == [0, KILLED, 0], ended.logs()
    check(ended, faults=1, world=2)
    assert re.search(r"epoch 1: 2 ranks from step 5 on, because rank 1 \(pid \d+\)", ended.logs())


@pytest.mark.slow
def test_rank_0_dies_and_with_it_the_store(tmp_path: Path) -> None:
    ended, codes = run_ranks_of_nobody(tmp_path, faults=[("kill", "forward", 5, 0)])
    assert codes == [KILLED, 0, 0], ended.logs()
    check(ended, faults=1, world=2)


@pytest.mark.slow
def test_two_at_once(tmp_path: Path) -> None:
    faults = [("kill", "bucket", 5, 0), ("kill", "bucket", 5, 2)]
    ended, codes = run_ranks_of_nobody(tmp_path, faults=faults)
    assert codes == [KILLED, 0, KILLED], ended.logs()
    check(ended, faults=2, world=1)


@pytest.mark.slow
def test_a_stopped_rank_is_fenced(tmp_path: Path) -> None:
    ended, codes = run_ranks_of_nobody(
        tmp_path, faults=[("stop", "forward", 5, 1)], environ={STUCK_AFTER: "1.0"}
    )
    assert codes == [0, KILLED, 0], ended.logs()
    check(ended, faults=1, world=2)
    assert "was killed: it was stopped" in ended.logs()


@pytest.mark.slow
def test_a_rank_that_raises_is_missed(tmp_path: Path) -> None:
    ended, codes = run_ranks_of_nobody(tmp_path, faults=[("raise", "forward", 5, 2)])
    assert codes == [0, 0, 1], ended.logs()
    check(ended, faults=1, world=2)


@pytest.mark.slow
def test_sigterm_to_one_is_a_departure(tmp_path: Path) -> None:
    ended, codes = run_ranks_of_nobody(tmp_path, faults=[("terminate", "forward", 5, 1)])
    assert codes == [0, 0, 0], ended.logs()
    check(ended, faults=1, world=2)
    assert "rank 1 was told to end, and leaves after step 6" in ended.logs()


@pytest.mark.slow
def test_a_step_that_nobody_can_undo_ends_the_job_with_the_remedy(tmp_path: Path) -> None:
    ended, codes = run_ranks_of_nobody(
        tmp_path, faults=[("kill", "metrics", 5, 1)], metrics_before_commit=True
    )
    assert codes == [1, KILLED, 1], ended.logs()
    assert "Call state.commit() directly after the optimizer's step" in ended.logs()


def spawned(rank: int, environ: list[dict[str, str]], words: list[str]) -> None:
    """What mp.spawn starts."""
    reader, writer = mp.Pipe()
    with contextlib.closing(reader), contextlib.closing(writer):
        assert isinstance(writer, Connection)
        target = Target(TargetKind.SCRIPT, str(SCRIPT), tuple(words))
        code = run_rank(writer, target, rank, {**os.environ, **environ[rank]})
    sys.exit(code)


@pytest.mark.slow
def test_under_mp_spawn_without_join(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    order = {"steps": 20, "faults": [("kill", "bucket", 5, 0)]}
    port = free_port()
    environ = [rank_environ(3, port, rank, tmp_path) for rank in range(3)]
    context = mp.spawn(spawned, (environ, [str(out), json.dumps(order)]), nprocs=3, join=False)
    assert context is not None
    for process in context.processes:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in context.processes] == [KILLED, 0, 0]
    wait_gone(tmp_path)
    check(Ended(0, out, RunFolder(tmp_path)), faults=1, world=2)


def run_torchrun(
    tmp_path: Path, *words: str, ranks: int = 2, **order: Any
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    out = tmp_path / "out"
    out.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, f"--nproc-per-node={ranks}", *words, str(SCRIPT), str(out), json.dumps(order)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary(tmp_path))},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    wait_gone(tmp_path)
    return out, done


@pytest.mark.slow
class TestTorchrun:
    def test_it_trains(self, tmp_path: Path) -> None:
        out, done = run_torchrun(tmp_path, steps=20, faults=[])
        assert done.returncode == 0, done.stderr
        check(Ended(0, out, RunFolder(tmp_path)), faults=0, world=2)

    def test_survivors_save_before_it_ends_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PACELINE_STAND_IN", "0")
        faults = [("kill", "bucket", 12, 1)]
        out, done = run_torchrun(tmp_path, steps=100_000, faults=faults, pause_s=0.05, save=10)
        assert done.returncode == 1
        found = re.search(r"rank 0 was told to end, and leaves after step (\d+), which is saved",
                          done.stderr)  # fmt: skip
        assert found, done.stderr
        assert re.search(r"because rank 1 \(pid \d+\) ended", done.stderr)
        assert "`paceline run --elastic`" in done.stderr
        steps = sorted(path.name for path in (out / "checkpoints").iterdir())
        assert int(found[1]) >= 12  # committed when rank 1 died; more, if torchrun is slower
        assert steps[-1].endswith(found[1]), steps

    @pytest.mark.parametrize("stand_in", [(), STAND_IN])
    def test_survivors_go_on(self, tmp_path: Path, stand_in: tuple[str, ...]) -> None:
        faults = [("kill", "bucket", 5, 0), ("exit", "forward", 12, 1)]
        out, done = run_torchrun(tmp_path, *stand_in, ranks=3, steps=20, faults=faults)
        assert done.returncode == 0, done.stderr
        check(Ended(0, out, RunFolder(tmp_path)), faults=2, world=1)
        assert "was told to end" not in done.stderr

    def test_if_none_survives_torchrun_hears_of_it(self, tmp_path: Path) -> None:
        faults = [("kill", "bucket", 5, 0), ("kill", "forward", 8, 0)]
        _, done = run_torchrun(tmp_path, steps=20, faults=faults)
        assert done.returncode == 1
        assert "the other ranks have failed, too" in done.stderr
        assert "Signal 9 (SIGKILL)" in done.stderr
