"""Ranks that leave their process to a stand-in by themselves, and those that cannot."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException

from paceline.elastic.supervised.own_stand_in import SWITCH
from paceline.elastic.supervised.supervisor import STUCK_AFTER
from paceline.observe.run_folder import RunFolder
from tests.elastic.jobs import SCRIPT, Ended, Fault, check
from tests.elastic.supervised.test_supervisor import rank_environ, wait_gone
from tests.system import free_port

RANKS = 3
# A rank as torchrun starts it: it says what it is, and how it ends.
RANK = """
import os, random, sys, threading
sys.modules["__main__"].started = os.getpid()
{imports}
import torch.distributed as dist
random.seed(7)
{before}
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", "file://" + sys.argv[1], rank=rank, world_size=2)
print(started == os.getpid(), random.random())
sys.exit(int(sys.argv[2]))
"""
DRAWN = "0.32383276483316237"  # the first after seed(7)


def run_rank_of_torchrun(
    tmp_path: Path, *, imports: str = "", before: str = "", code: int = 0, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Two of them; how the first ends, and what it prints."""
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(imports=imports, before=before))
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
    command = [sys.executable, str(script), str(tmp_path / "store"), str(code)]
    both = [
        subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", **common, "RANK": rank, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [each.communicate(timeout=120) for each in both]
    return subprocess.CompletedProcess(command, both[0].returncode, *said[0])


ELASTIC = "import paceline.elastic as elastic"


def test_the_rank_is_a_child_and_draws_the_same_numbers(tmp_path: Path) -> None:
    done = run_rank_of_torchrun(tmp_path, imports=ELASTIC, code=3)
    assert done.stdout.split() == ["False", DRAWN], done.stderr
    assert done.returncode == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "before", "environ"),
    [
        ("import paceline", "", {}),
        (ELASTIC, "", {SWITCH: "0"}),
        (ELASTIC, "", {"LOCAL_WORLD_SIZE": "1"}),
        (ELASTIC, "threading.Thread(target=lambda: threading.Event().wait(), daemon=True).start()",
         {}),
    ],
    ids=["not asked for", "switched off", "several hosts", "threads"],
)  # fmt: skip
def test_otherwise_it_stays_where_it_is(
    tmp_path: Path, imports: str, before: str, environ: dict[str, str]
) -> None:
    done = run_rank_of_torchrun(tmp_path, imports=imports, before=before, **environ)
    assert done.stdout.split() == ["True", DRAWN], done.stderr
    assert done.returncode == 0


def train_in_spawned(rank: int, environ: list[dict[str, str]], words: list[str]) -> None:
    """What mp.spawn starts: the script is its main module."""
    os.environ.update(environ[rank])
    sys.argv = [str(SCRIPT), *words]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def spawn_and_join(tmp_path: Path, faults: list[Fault], **environ: str) -> Ended:
    out = tmp_path / "out"
    out.mkdir()
    port = free_port()
    each = [{**rank_environ(RANKS, port, rank, tmp_path), **environ} for rank in range(RANKS)]
    words = [str(out), json.dumps({"steps": 20, "faults": faults})]
    mp.spawn(train_in_spawned, (each, words), nprocs=RANKS, join=True)
    return Ended(0, out, RunFolder(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestSpawnWithJoin:
    def test_survivors_go_on(self, tmp_path: Path) -> None:
        faults = [("kill", "bucket", 5, 0), ("raise", "forward", 12, 1)]
        ended = spawn_and_join(tmp_path, faults, **{STUCK_AFTER: "0"})
        wait_gone(tmp_path)
        check(ended, faults=2, world=1)

    def test_if_none_survives_it_raises(self, tmp_path: Path) -> None:
        faults = [("kill", "bucket", 5, n) for n in range(RANKS)]
        with pytest.raises(ProcessExitedException, match="terminated with signal SIGKILL"):
            spawn_and_join(tmp_path, faults)
        wait_gone(tmp_path)
