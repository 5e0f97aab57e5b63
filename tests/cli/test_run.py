"""``paceline run``: scripts run as under ``python``, failures are one block, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from tests.cli.launched import ROOT, environ, finish, launch, running, start, until, wait_started
from tests.system import is_running

SURROUNDINGS = """
import json, multiprocessing, os, pickle, sys, threading, atexit
def double(x): return 2 * x
def describe():
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv, "path": sys.path, "orig": sys.orig_argv[1:], "name": __name__,
        "file": __file__, "spec": repr(main.__spec__), "package": main.__package__,
        "cached": main.__cached__, "doc": main.__doc__, "names": sorted(vars(main)),
        "process": multiprocessing.current_process().name,
        "parent": multiprocessing.parent_process() is None,
        "pickled": pickle.loads(pickle.dumps(double))(4),
        "threads": threading.active_count(), "leads": os.getsid(0) == os.getpid(),
        "environ": {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
    }
if __name__ == "__main__":
    found = describe()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found["spawned"] = pool.apply(double, (21,))
    out = os.environ.get("RANK", "alone")
    atexit.register(lambda: open(out + ".json", "w").write(json.dumps(found)))
    print("out", out); print("err", out, file=sys.stderr)
    sys.exit(0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "train.py").write_text(SURROUNDINGS)
    return tmp_path


def read(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.read_text())
    return found


def test_a_script_cannot_tell_the_difference(folder: Path) -> None:
    words = ["dir/train.py", "--epochs", "3", "-n", "x"]
    plain = subprocess.run(
        [sys.executable, "-u", *words], cwd=folder, env=environ(), capture_output=True, timeout=60
    )
    assert plain.returncode == 0
    done = launch("-n", "2", "--run-dir", "kept", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    alone, rank0, rank1 = (read(folder / f"{name}.json") for name in ("alone", "0", "1"))
    for found in (rank0, rank1):
        added = set(found["environ"]) - set(alone["environ"])  # type: ignore[call-overload]
        assert {"MASTER_PORT", "OMP_NUM_THREADS", "PACELINE_RUN_DIR"} <= added
        assert found.pop("environ")["WORLD_SIZE"] == "2"  # type: ignore[index]
        assert found.pop("leads")
    for name in ("environ", "leads"):
        alone.pop(name)
    assert rank0 == alone
    assert rank1 == alone
    assert "out 0\n" in done.stdout
    assert "[1] out 1\n" in done.stdout
    assert done.stderr.count("err") == 2
    assert set((folder / "kept" / "rank1.log").read_text().split("\n")) == {"out 1", "err 1", ""}
    assert (folder / "kept").stat().st_mode & 0o777 == 0o700
    assert (folder / "kept" / "rank0.log").stat().st_mode & 0o777 == 0o600
    assert read(folder / "kept" / "run.json")["command"] == words


FAILS = """
import os, sys, signal, torch, torch.distributed as dist
from paceline import DistributedDataParallel
def train(how):
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(3):
        print("step", step)
        if step == 2 and dist.get_rank() == 1:
            if how == "raise": raise ValueError("no such label")
            if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit": sys.exit(7)
            if how == "early": sys.exit()
            if how == "_exit": os._exit(3)
        model(torch.ones(2, 4)).sum().backward()
if __name__ == "__main__":
    dist.init_process_group("gloo")
    print("to stderr", file=sys.stderr)
    train(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("how", "status", "says"),
    [
        ("raise", 1, "ValueError: no such label (FOLDER/fails.py:9, in train)"),
        pytest.param("kill", 137, "killed by SIGKILL: ", marks=pytest.mark.slow),
        pytest.param("exit", 7, "SystemExit: 7", marks=pytest.mark.slow),
        pytest.param("early", 1, "ended (exit code 0) while", marks=pytest.mark.slow),
        pytest.param("_exit", 3, "exited with code 3", marks=pytest.mark.slow),
    ],
)
def test_a_failure_is_one_block(how: str, status: int, says: str, tmp_path: Path) -> None:
    """Of exceptions the terminal shows nothing else, and still all that the script prints."""
    (tmp_path / "fails.py").write_text(FAILS)
    done = launch("-n", "3", "--run-dir", "run", "fails.py", how, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    block = (tmp_path / "run" / "failure.txt").read_text()
    printed, _, shown = done.stderr.partition("\n\n")
    lines = [line for line in printed.splitlines() if not line.startswith("step ")]  # how it goes
    assert sorted(lines) == ["[1] to stderr", "[2] to stderr", "to stderr"]
    assert shown == block
    assert sorted(done.stdout.splitlines()) == sorted(
        f"{before}step {step}" for before in ("", "[1] ", "[2] ") for step in range(3)
    )
    first, *_, last = block.splitlines()
    assert first.startswith("paceline run: rank 1 (pid ")
    assert "failed first: " + says.replace("FOLDER", str(tmp_path)) in first
    assert "    | step 2" in block
    logs = "their logs are rank0.log, rank2.log"
    assert last == f"  because of that: ranks 0, 2 raised PeerLostError; {logs}"
    log = (tmp_path / "run" / "rank1.log").read_text()
    assert "launch/script.py" not in log, "the traceback has frames of ours"
    assert log.count("Traceback") == block.count("Traceback") == (how == "raise")
    assert f'  File "{tmp_path}/fails.py", line 18, in <module>\n' in log or how != "raise"
    assert ("it was last seen " in block) == (how in ("kill", "_exit"))
    for rank in (0, 2):
        log = (tmp_path / "run" / f"rank{rank}.log").read_text()
        assert "PeerLostError: " in log
        assert "launch/script.py" not in log
        assert "[rank" not in log


LINGERS = """
import os, sys, threading, time
def wait():
    while not os.path.exists("go"): time.sleep(0.01)
threading.Thread(target=wait).start()
if os.fork() == 0: raise KeyError("in a fork of the rank")
os.wait()
raise ValueError("on its own")
"""


@pytest.mark.slow
def test_a_traceback_does_not_wait_for_ever(tmp_path: Path) -> None:
    """A rank that has raised and does not end; and a fork of a rank is not the rank."""
    (tmp_path / "lingers.py").write_text(LINGERS)
    with running("--run-dir", "run", "lingers.py", cwd=tmp_path) as launcher:
        assert launcher.stderr is not None
        lines = []
        while not lines or "ValueError: on its own" not in lines[-1]:
            lines.append(launcher.stderr.readline())
            assert lines[-1], lines
        (tmp_path / "go").touch()
        done = finish(launcher)
    text = "".join(lines)
    assert "KeyError: 'in a fork of the rank'" in text
    assert "rank 0 has raised this, and has not ended: it may wait for its threads\n" in text
    assert "failed first: ValueError: on its own (" in done.stderr
    log = (tmp_path / "run" / "rank0.log").read_text()
    assert log.count("ValueError: on its own") == 1


WAITS = """
import os, signal, sys, time
for number in map(int, sys.argv[1].split(",")):
    signal.signal(number, signal.SIG_IGN)
grandchild = os.fork()
if grandchild == 0:
    if os.environ["RANK"] == "1": os.setsid()
    time.sleep(600)
    os._exit(0)
me = os.environ["RANK"]
open(me + ".new", "w").write(f"{os.getpid()} {grandchild}")
os.rename(me + ".new", me + ".pids")
try:
    time.sleep(600)
except KeyboardInterrupt:
    open(me + ".interrupted", "w")
    raise
"""
NONE_IGNORED, ALL_IGNORED = "28", "2,15,1"


@pytest.mark.parametrize(
    ("signals", "ignored", "status"),
    [
        ([signal.SIGINT], NONE_IGNORED, 130),
        pytest.param([signal.SIGTERM], NONE_IGNORED, 143, marks=pytest.mark.slow),
        pytest.param([signal.SIGINT], ALL_IGNORED, 130, marks=pytest.mark.slow),
        pytest.param([signal.SIGINT, signal.SIGINT], ALL_IGNORED, 130, marks=pytest.mark.slow),
        pytest.param([signal.SIGKILL], ALL_IGNORED, -9, marks=pytest.mark.slow),
    ],
    ids=["Ctrl-C", "SIGTERM", "ignored", "twice", "killed"],
)
def test_all_ends(signals: list[int], ignored: str, status: int, tmp_path: Path) -> None:
    """Ranks and what they have started, in the session and out of it."""
    (tmp_path / "waits.py").write_text(WAITS)
    # With 600 s, only a second Ctrl-C ends what ignores the first.
    limit = "600" if len(signals) == 2 else "2"
    words = ["-n", "2", "--shutdown-timeout", limit, "waits.py", ignored]
    with running(*words, cwd=tmp_path) as launcher:
        pids = wait_started(tmp_path, launcher)
        for number in signals:
            launcher.send_signal(number)
            if len(signals) == 2 and launcher.stderr is not None and number is signals[0]:
                assert launcher.stderr.readline() == "\n"
                assert "once more to kill" in launcher.stderr.readline()
                signals = signals[1:] + signals[:1]
                launcher.send_signal(signal.SIGINT)
                break
        done = finish(launcher)
    assert done.returncode == status, done.stderr
    until(lambda: not any(map(is_running, pids)), "a process lives on")
    assert not (tmp_path / "paceline-runs" / "failure.txt").exists()
    if signals[0] == signal.SIGINT and ignored == NONE_IGNORED:
        assert (tmp_path / "0.interrupted").exists()
        assert (tmp_path / "1.interrupted").exists()


@pytest.mark.slow
def test_a_killed_fork_server_leaves_nobody(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    with running("-n", "2", "waits.py", ALL_IGNORED, cwd=tmp_path) as launcher:
        pids = wait_started(tmp_path, launcher)
        status = Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()
        os.kill(int(status[1]), signal.SIGKILL)
        done = finish(launcher)
    assert done.returncode == 137, done.stderr
    until(lambda: not any(map(is_running, pids)), "a process lives on")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-n", "0", "train.py"], "-n is a number from 1 to 4096, or auto; not 0"),
        (["-n", "two", "train.py"], "not two"),
        (["-n", "2"], "which script?"),
        (["nosuch.py"], "there is no script nosuch.py"),
        (["trian.py"], "did you mean train.py?"),
        (["."], "is a directory"),
        (["--no-python", "no-such-program"], "there is no program no-such-program"),
        (["-m", "--no-python", "x"], "exclude each other"),
        (["--tee", "0,7", "train.py"], "--tee is all, none or numbers from 0 to 0"),
        (["--nnodes", "2", "train.py"], "--nnodes needs --rdzv-endpoint"),
        (["--nnodes", "1:3", "train.py"], "needs --elastic"),
        (["--nnodes", "1:", "train.py"], "or MIN:MAX; not 1:"),
        (["--elastic", "--nnodes", "3:2", "train.py"], "must not decrease"),
        (["--elastic", "--nnodes", "2", "--master-addr", "127.0.0.1", "x"], "needs --job-key"),
        (["--elastic", "--lease", "9", "train.py"], "--lease is for several hosts"),
        (["--elastic", "--job-key", "k", "train.py"], "--job-key is for several hosts"),
        (["--lease", "9", "train.py"], "--lease needs --elastic"),
        (["--elastic", "--min", "3", "-n", "2", "train.py"], "must not decrease"),
        (["--nnodes", "2", "--node-rank", "2", "train.py"], "--node-rank is a number from 0 to 1"),
        (["--rdzv-endpoint", "node0:x", "train.py"], "HOST:PORT"),
        (["--run-dir", "full", "train.py"], "full is not empty"),
        (["--run-dir", "train.py/x", "train.py"], "cannot be made"),
    ],
)
def test_what_is_wrong_is_said(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["run", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("paceline run: ")
    assert says in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("typo", "hint"),
    [
        (["--nproc-per-nod", "3"], "did you mean --nproc-per-node?"),
        (["--transprot=shm"], "did you mean --transport?"),
        (["--bogus"], "paceline run --help lists them"),
        (["-x"], "paceline run --help lists them"),
    ],
)
def test_a_typo_in_an_option(
    typo: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *typo, "train.py"]) == 2
    name = typo[0].partition("=")[0]
    assert capsys.readouterr().err == (
        f"paceline run: there is no option {name}; options of the script come after it; {hint}\n"
    )


@pytest.mark.parametrize("option", ["--stall-after", "--shutdown-timeout"])
@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_what_is_no_time(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", f"{option}={value}", "train.py"])
    assert f"a number of seconds, not {value}\n" in capsys.readouterr().err


@pytest.mark.slow
class TestWholeRuns:
    def test_a_port_in_use(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text("")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            endpoint = f"localhost:{taken.getsockname()[1]}"
            done = launch("--rdzv-endpoint", endpoint, "train.py", cwd=tmp_path)
        assert done.returncode == 2
        assert f"port {endpoint.partition(':')[2]} cannot be used" in done.stderr
        assert "Address already in use" in done.stderr

    def test_modules_programs_and_two_runs_at_once(self, folder: Path) -> None:
        (folder / "dir" / "__init__.py").write_text("")
        module = start("-n", "2", "-m", "dir.train", cwd=folder)
        program = start("-n", "2", "--no-python", "printenv", "RANK", cwd=folder)
        assert finish(module).returncode == 0
        done = finish(program)
        assert sorted(done.stdout.split("\n")) == ["", "0", "[1] 1"]
        assert len(list((folder / "paceline-runs").iterdir())) == 2
        found = read(folder / "0.json")
        assert found["argv"] == [str(folder / "dir" / "train.py")]
        assert found["package"] == "dir"
        assert found["spawned"] == 42

    def test_options_reach_the_script(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(
            "import os, paceline, torch\n"
            "from torch.nn.parallel import DistributedDataParallel as DDP\n"
            "assert DDP is paceline.DistributedDataParallel, DDP\n"
            "torch.distributed.init_process_group('gloo')\n"
            "print(DDP(torch.nn.Linear(2, 2)).stats().transport, torch.get_num_threads())\n"
            "print(os.environ['PACELINE_STALL_AFTER'])\n"
            "torch.distributed.destroy_process_group()\n"
        )
        words = ["--patch", "--transport", "c10d", "--stall-after", "2.5", "--tee", "0"]
        done = launch("-n", "2", *words, "train.py", cwd=tmp_path, env=environ(OMP_NUM_THREADS="2"))
        assert done.stdout == "c10d:gloo 2\n2.5\n", done.stderr

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        """Without a name for it, training goes on elsewhere, and says where."""
        (tmp_path / "train.py").write_text("print('trained')")
        (tmp_path / "paceline-runs").write_text("a file is in the way")
        (tmp_path / "tmp").mkdir()
        env = environ(TMPDIR=str(tmp_path / "tmp"))
        done = launch("train.py", cwd=tmp_path, env=env)
        assert done.returncode == 0
        assert done.stdout == "trained\n"
        assert "cannot be made" in done.stderr
        (made,) = (tmp_path / "tmp").glob("paceline-run-*")
        assert str(made) in done.stderr
        assert (made / "rank0.log").read_text() == "trained\n"

    def test_the_environment_is_torchruns(self, folder: Path) -> None:
        words = ["--nproc-per-node", "2", "dir/train.py"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *words]
        subprocess.run(torchrun, cwd=folder, env=environ(), check=True, capture_output=True)
        theirs = [read(folder / f"{rank}.json") for rank in range(2)]
        assert launch("--nproc-per-node", "2", "dir/train.py", cwd=folder).returncode == 0
        ours = [read(folder / f"{rank}.json") for rank in range(2)]
        own = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS"}
        for found, expected in zip(ours, theirs, strict=True):
            environment: dict[str, str] = found.pop("environ")  # type: ignore[assignment]
            wanted: dict[str, str] = expected.pop("environ")  # type: ignore[assignment]
            assert environment.pop("PACELINE_RUN_DIR")
            assert environment.keys() == wanted.keys()
            differ = {name for name in wanted if environment[name] != wanted[name]}
            assert differ <= own
            assert found == expected

    def test_the_example_of_the_help(self, tmp_path: Path) -> None:
        words = [sys.executable, "-m", "paceline", "run", "--help"]
        shown = subprocess.run(words, capture_output=True, text=True, env=environ(), check=True)
        line = next(line for line in shown.stdout.splitlines() if "train_mlp.py" in line)
        example = line.partition("  two ranks")[0].split()[2:]
        done = launch("--run-dir", str(tmp_path / "run"), *example, cwd=ROOT)
        assert "epoch  2  loss" in done.stdout
