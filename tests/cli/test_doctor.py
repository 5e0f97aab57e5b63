"""``paceline doctor``: a running job, the list of jobs, the machine; exit status and JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline import DistributedDataParallel as DDP
from paceline.cli import main
from paceline.cli.doctor_env import CHECKS, Finding, Level, cgroup_memory_of
from paceline.observe.jobs import listed_job
from paceline.observe.launched import read_launched
from paceline.observe.run_folder import RunFolder
from paceline.processes import ProcessState, process_state
from paceline.testing import run_ranks
from tests.cli.launched import finish, running, until
from tests.ddp.compare import batch
from tests.ddp.models import mlp


def doctor(*words: str) -> dict[str, Any]:
    """As from another terminal."""
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "doctor", *words], capture_output=True, text=True
    )
    return {"status": done.returncode, "out": done.stdout, "err": done.stderr}


def doctor_when_all_wait(folder: str) -> dict[str, Any]:
    """Ask until the others wait for longer than a healthy step takes, and all have answered."""
    answers: list[dict[str, Any]] = []

    def is_told() -> bool:
        answers.append(doctor(folder, "--json"))
        told = json.loads(answers[-1]["out"])
        return bool(told["stalled"]) and all(each["answers"] for each in told["ranks"])

    until(is_told, "nobody waits, or not everybody answers")
    return answers[-1]


def late_rank(folder: str) -> list[dict[str, Any]]:
    """Rank 1 asks what is wrong while the others wait for it; it is what is wrong."""
    ddp = DDP(mlp(4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    found = []
    for step in range(6):
        if step == 4 and dist.get_rank() == 1:
            found = [doctor_when_all_wait(folder), doctor(folder)]
        optimizer.zero_grad()
        ddp(batch(step)).square().mean().backward()
        optimizer.step()
    return found


def test_a_running_job(tmp_path: Path) -> None:
    folder = str(tmp_path)
    _, (as_json, as_text), _ = run_ranks(3, late_rank, folder, env={"PACELINE_RUN_DIR": folder})
    assert as_json["status"] == as_text["status"] == 1, as_json
    told = json.loads(as_json["out"])
    assert told["stalled"]
    assert [each["is_behind"] for each in told["ranks"]] == [False, True, False]
    one = told["ranks"][1]
    assert one["process"] == "alive"
    assert one["activity"] == "input"
    assert "test_doctor.py" in one["place"]
    assert all(each["answers"] for each in told["ranks"])
    assert told["ranks"][0]["awaited"].startswith("bucket 0 (of ")
    assert as_text["out"].startswith("Rank 1 (pid ")
    assert "test_doctor.py" in as_text["out"].splitlines()[0]
    assert not list(tmp_path.glob("stall-*")), "nobody asked for a stall report"


HANGS = """
import os, signal, torch.distributed as dist
open(os.environ["RANK"] + ".pid", "w").write(str(os.getpid()))
if os.environ["RANK"] == "1": os.kill(os.getpid(), signal.SIGSTOP)
dist.init_process_group("gloo")
"""


def test_a_job_that_hangs_before_it_records(tmp_path: Path) -> None:
    """The launcher knows its processes, and /proc what became of them."""
    (tmp_path / "hangs.py").write_text(HANGS)
    run = tmp_path / "run"
    with running("-n", "2", "--run-dir", "run", "hangs.py", cwd=tmp_path) as launcher:
        until(lambda: (run / "host0.pids").exists(), "no start")
        assert (run / "host0.pids").stat().st_mode & 0o777 == 0o600
        until(lambda: all(len(doctor_pids(tmp_path, rank)) for rank in "01"), "no pids")
        stopped, alive = (int(doctor_pids(tmp_path, rank)) for rank in "10")
        until(lambda: process_state(stopped, 0) is ProcessState.STOPPED, "not stopped")
        as_text, as_json = doctor(str(run)), doctor(str(run), "--json")
        os.kill(stopped, signal.SIGKILL)
        finish(launcher)
    assert as_text["status"] == as_json["status"] == 1
    assert "no rank has recorded anything" in as_text["out"]
    lines = as_text["out"].splitlines()
    assert lines[-2].endswith("): alive")
    assert f"rank 0 (pid {alive} on " in lines[-2]
    assert lines[-1].endswith("): stopped")
    assert f"rank 1 (pid {stopped} on " in lines[-1]
    told = json.loads(as_json["out"])["silent"]
    assert [(each["rank"], each["pid"]) for each in told] == [(0, alive), (1, stopped)]
    assert [each["process"] for each in told] == ["alive", "stopped"]
    assert doctor(str(run))["out"].count("): dead") == 2


def doctor_pids(folder: Path, rank: str) -> str:
    """What a rank has written; '' before that."""
    path = folder / f"{rank}.pid"
    return path.read_text() if path.exists() else ""


def test_a_file_of_processes_that_makes_no_sense(tmp_path: Path) -> None:
    for number, text in enumerate(("", "[]", "{}", "[1]", '[{"rank": "x"}]', "[", '"x"')):
        (tmp_path / f"host{number}.pids").write_text(text)
    assert read_launched(RunFolder(tmp_path)) == []


def test_a_job_that_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def on_rank() -> None:
        ddp = DDP(mlp(4))
        ddp(batch(0)).square().mean().backward()

    run_ranks(2, on_rank, env={"PACELINE_RUN_DIR": str(tmp_path)})
    assert main(["doctor", str(tmp_path)]) == 0
    assert "the job is over" in capsys.readouterr().out


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path / "nothing")]) == 2
    assert "there is no run folder" in capsys.readouterr().err


def test_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["doctor"]) == 0
    assert "No job of this user" in capsys.readouterr().out
    with listed_job(tmp_path / "run", ["train.py", "--lr", "1"]):
        assert main(["doctor"]) == 0
        text = capsys.readouterr().out
        assert main(["doctor", "--json"]) == 0
        (job,) = json.loads(capsys.readouterr().out)
    assert "train.py --lr 1" in text
    assert f"paceline doctor {tmp_path / 'run'}" in text
    assert job["pid"] == os.getpid()


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "env"])
    text = capsys.readouterr().out
    assert main(["doctor", "env", "--json"]) == status
    findings = json.loads(capsys.readouterr().out)
    assert len(findings) == len(CHECKS)
    names = {each["name"]: each for each in findings}
    assert names["torch"]["found"].startswith(torch.__version__)
    assert {"backends", "native core", "memory", "cores", "clock", "/dev/shm"} <= names.keys()
    assert all(name in text for name in names)
    assert not any("cannot be checked" in each["found"] for each in findings)
    assert status == int(any(each["level"] == "fail" for each in findings))


def test_env_says_what_to_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert main(["doctor", "env"]) == 1
    text = capsys.readouterr().out
    assert "GLOO_SOCKET_IFNAME=nosuch0 is not one of them" in text
    assert "OMP_NUM_THREADS * ranks should be" in text


@pytest.mark.parametrize(
    ("limit", "used", "idle"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_cached_files_are_no_used_memory(tmp_path: Path, limit: str, used: str, idle: str) -> None:
    (tmp_path / limit).write_text("1000\n")
    (tmp_path / used).write_text("900\n")
    (tmp_path / "memory.stat").write_text(f"anon 300\nfile 600\n{idle} 500\nactive_file 100\n")
    assert cgroup_memory_of(tmp_path) == (1000, 400)
    (tmp_path / limit).write_text("max\n" if limit == "memory.max" else f"{1 << 63}\n")
    assert cgroup_memory_of(tmp_path) is None
    (tmp_path / limit).unlink()
    with pytest.raises(OSError, match="No such file"):
        cgroup_memory_of(tmp_path)


def test_a_check_that_fails_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check_nothing() -> Finding:
        raise OSError("no such thing")

    def check_all() -> Finding:
        return Finding("all", Level.OK, "fine")

    monkeypatch.setattr("paceline.cli.doctor_env.CHECKS", (check_nothing, check_all))
    assert main(["doctor", "env"]) == 0
    assert "nothing  cannot be checked: OSError: no such thing" in capsys.readouterr().out
