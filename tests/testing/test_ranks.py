"""run_ranks: what it returns, what it says when ranks fail, and that nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.errors import ConfigurationError, PacelineError
from paceline.testing import RanksFailedError, run_ranks
from paceline.testing.failures import Outcome
from tests.system import is_running, wait_gone

KEPT: list[object] = []  # survives the function that runs in a rank


def rank_and_argument(argument: str) -> tuple[int, str]:
    return dist.get_rank(), argument


def wait_for_ever() -> None:
    threading.Event().wait()


def failure_text(
    n: int, fn: Callable[[], object], words: str, *, timeouts_s: tuple[float, ...]
) -> str:
    """Run ranks into a deadline; a longer one if a busy machine was not so far at that moment."""
    for timeout_s in timeouts_s:
        with pytest.raises(RanksFailedError) as caught:
            run_ranks(n, fn, timeout_s=timeout_s, init=False)
        text = str(caught.value)
        if words in text and "--- rank 0" not in text.replace(f"--- rank {n - 1}", ""):
            break
    assert words in text
    return text


class TestResults:
    def test_come_in_rank_order(self) -> None:
        assert run_ranks(3, rank_and_argument, "a") == [(0, "a"), (1, "a"), (2, "a")]

    def test_one_rank(self) -> None:
        assert run_ranks(1, rank_and_argument, "a") == [(0, "a")]

    def test_ranks_communicate(self) -> None:
        def total() -> torch.Tensor:
            value = torch.full((3,), dist.get_rank() + 1.0)
            dist.all_reduce(value)
            return value

        for value in run_ranks(2, total):
            torch.testing.assert_close(value, torch.full((3,), 3.0))

    def test_closure_and_lambda(self) -> None:
        offset = 10
        assert run_ranks(2, lambda: dist.get_rank() + offset) == [10, 11]

    def test_large_results(self) -> None:
        results = run_ranks(2, lambda: torch.zeros(4_000_000))
        assert [r.numel() for r in results] == [4_000_000] * 2

    def test_a_rank_that_returns_early_keeps_its_group_for_the_others(self) -> None:
        def receive_in_the_background() -> None:
            if dist.get_rank() == 0:
                buffer = torch.zeros(1)
                KEPT.extend([buffer, dist.irecv(buffer, 1)])
            else:
                time.sleep(0.2)
                dist.send(torch.ones(1), 0)

        run_ranks(2, receive_in_the_background)

    def test_nested(self) -> None:
        def outer() -> list[int]:
            return run_ranks(2, lambda: dist.get_rank() * 10)

        assert run_ranks(1, outer) == [[0, 10]]


class TestSurroundings:
    def test_env_is_set_unset_and_inherited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PACELINE_A", "from the caller")
        monkeypatch.setenv("PACELINE_B", "from the caller")
        names = ["PACELINE_A", "PACELINE_B", "PACELINE_C", "RANK", "WORLD_SIZE"]
        env = {"PACELINE_B": None, "PACELINE_C": "given"}
        got = run_ranks(2, lambda: [os.environ.get(name) for name in names], env=env)
        assert got == [["from the caller", None, "given", str(rank), "2"] for rank in (0, 1)]

    def test_working_directory(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        assert run_ranks(1, os.getcwd) == [str(tmp_path)]

    def test_threads(self) -> None:
        assert run_ranks(1, torch.get_num_threads) == [1]
        assert run_ranks(1, torch.get_num_threads, threads=2) == [2]

    def test_warning_filters(self) -> None:
        def warn() -> None:
            warnings.warn("be careful", UserWarning, stacklevel=1)

        with pytest.raises(RanksFailedError, match="UserWarning: be careful"):
            run_ranks(1, warn)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="be careful")
            run_ranks(1, warn)

    def test_output_goes_to_the_callers_streams(self, capfd: pytest.CaptureFixture[str]) -> None:
        def speak() -> None:
            # One write each: what several processes print may be mixed, word by word.
            sys.stdout.write(f"out {dist.get_rank()}\n")
            sys.stderr.write(f"err {dist.get_rank()}\n")

        run_ranks(2, speak)
        out, err = capfd.readouterr()
        assert sorted(out.split("\n")) == ["", "out 0", "out 1"]
        assert sorted(err.split("\n")) == ["", "err 0", "err 1"]

    def test_without_a_group(self) -> None:
        def own_group() -> int:
            assert not dist.is_initialized()
            dist.init_process_group(
                "gloo",
                init_method=os.environ["PACELINE_TEST_INIT_METHOD"],
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
            )
            return dist.get_world_size()

        assert run_ranks(2, own_group, init=False) == [2, 2]


class TestFailures:
    def test_every_traceback_is_shown(self) -> None:
        def fail() -> None:
            raise ValueError(f"trouble {dist.get_rank()}")

        with pytest.raises(RanksFailedError) as caught:
            run_ranks(2, fail)
        text = str(caught.value)
        for rank in (0, 1):
            assert f"--- rank {rank}: raised ValueError: trouble {rank}" in text
        assert text.count(" in fail\n") == 2
        assert {f.rank for f in caught.value.failures} == {0, 1}
        assert isinstance(caught.value, PacelineError)
        assert isinstance(caught.value, RuntimeError)

    def test_the_first_to_fail_comes_first_and_its_peers_do_not_hang(self) -> None:
        def fail() -> None:
            if dist.get_rank() == 1:
                raise ValueError("the cause")
            dist.barrier()

        with pytest.raises(
            RanksFailedError, match="rank 1: raised ValueError: the cause"
        ) as caught:
            run_ranks(3, fail)
        assert caught.value.rank == 1
        assert [f.outcome for f in caught.value.failures] == [Outcome.RAISED] * 3

    def test_others_get_a_grace_period(self) -> None:
        def fail() -> None:
            if dist.get_rank() == 0:
                raise ValueError("the cause")
            wait_for_ever()

        with pytest.raises(RanksFailedError) as caught:
            run_ranks(2, fail, grace_s=2.0)
        assert "rank 1: still running 2 s after rank 0 failed" in str(caught.value)
        assert "in wait_for_ever" in str(caught.value)

    def test_a_killed_rank_is_named(self) -> None:
        def die() -> None:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()

        with pytest.raises(RanksFailedError, match="rank 1: killed by SIGKILL"):
            run_ranks(2, die, grace_s=3.0)

    def test_a_rank_that_exits_is_named(self) -> None:
        with pytest.raises(RanksFailedError, match="exited with code 7 before it returned"):
            run_ranks(1, lambda: os._exit(7))
        with pytest.raises(RanksFailedError, match="raised SystemExit: 0"):
            run_ranks(1, lambda: sys.exit(0))

    def test_the_deadline_names_stuck_ranks_and_where_they_are(self) -> None:
        def stuck() -> int:
            if os.environ["RANK"] == "1":
                wait_for_ever()
            return os.getpid()

        text = failure_text(2, stuck, "in wait_for_ever", timeouts_s=(3.0, 30.0))
        assert re.search(r"not done within timeout_s=\d+; still running: rank 1\n", text)
        assert "--- rank 0" not in text

    def test_a_stopped_rank_is_killed(self) -> None:
        def stop() -> None:
            os.kill(os.getpid(), signal.SIGSTOP)

        text = failure_text(1, stop, "no stack: it did not answer", timeouts_s=(0.3, 3.0, 30.0))
        assert "killed" in text

    def test_a_rank_that_crashes_on_the_way_out(self) -> None:
        def explode(*_: object) -> None:
            raise ValueError("cannot destroy")

        def sabotage() -> None:
            dist.destroy_process_group = explode

        with pytest.raises(
            RanksFailedError, match=r"returned, then .* while shutting down"
        ) as caught:
            run_ranks(1, sabotage)
        assert "ValueError: cannot destroy" in str(caught.value)

    def test_a_result_that_cannot_be_pickled(self) -> None:
        with pytest.raises(RanksFailedError, match="the result of fn cannot be pickled"):
            run_ranks(1, threading.Lock)

    def test_works_after_a_failure(self) -> None:
        with pytest.raises(RanksFailedError):
            run_ranks(2, lambda: 1 / 0)
        assert run_ranks(2, dist.get_rank) == [0, 1]


class TestArguments:
    @pytest.mark.parametrize("n", [0, -1, 1.5, True, "2"])
    def test_n(self, n: object) -> None:
        with pytest.raises(ConfigurationError, match="at least one rank"):
            run_ranks(n, dist.get_rank)  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["timeout_s", "grace_s", "threads"])
    def test_numbers(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match=name):
            run_ranks(1, dist.get_rank, **{name: -1})  # type: ignore[arg-type]

    def test_arguments_that_cannot_be_pickled(self) -> None:
        with pytest.raises(ConfigurationError, match="fn and its arguments cannot be pickled"):
            run_ranks(1, print, threading.Lock())

    def test_a_closure_without_cloudpickle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cloudpickle", None)
        with pytest.raises(ConfigurationError, match="pip install cloudpickle"):
            run_ranks(1, lambda: None)


class TestScripts:
    """Ranks import the caller's script, which goes wrong in two ways that people run into."""

    SCRIPT = "from paceline.testing import run_ranks\nprint(run_ranks(1, int))\n"

    def test_a_call_that_ranks_would_repeat(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(self.SCRIPT)
        words = [sys.executable, str(script)]
        result = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert result.returncode == 1
        assert "Call it under `if __name__ == '__main__':`" in result.stderr

    def test_standard_input(self) -> None:
        words = [sys.executable, "-"]
        result = subprocess.run(
            words, input=self.SCRIPT, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 1
        assert "ConfigurationError: The script comes from standard input" in result.stderr

    @pytest.mark.slow
    def test_the_command_line(self) -> None:
        words = [sys.executable, "-c", self.SCRIPT]
        result = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert result.stdout == "[0]\n"


class TestForkServer:
    @pytest.mark.slow
    def test_a_server_that_cannot_import_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "broken.py").write_text("1 / 0")
        script = tmp_path / "script.py"
        script.write_text(
            "from paceline.testing import ForkServerError, ranks\n"
            "if __name__ == '__main__':\n"
            "    ranks._PRELOAD = ('broken',)\n"
            "    try:\n"
            "        ranks.run_ranks(1, print)\n"
            "    except ForkServerError as error:\n"
            "        print(error)\n"
        )
        result = subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        assert "rank 0 could not be started: the fork server has ended" in result.stdout
        assert "ZeroDivisionError" in result.stderr


SCRIPT = """
    import os, pathlib, sys, threading
    from paceline.testing import run_ranks

    if __name__ == "__main__":
        def stay(folder):
            pathlib.Path(folder, os.environ["RANK"] + ".tmp").write_text(str(os.getpid()))
            os.rename(f"{folder}/{os.environ['RANK']}.tmp", f"{folder}/{os.environ['RANK']}.pid")
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), 19)  # SIGSTOP: cannot notice anything by itself
            threading.Event().wait()

        run_ranks(2, stay, sys.argv[1])
"""


class TestCallerGoesAway:
    """Ranks end with the process that called run_ranks, however that one ends."""

    @pytest.mark.parametrize(
        "how",
        [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
        ids=lambda s: s.name,
    )
    def test_ranks_go_too(self, how: signal.Signals, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(SCRIPT))
        with subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed caller cannot remove its files
        ) as caller:
            files = [tmp_path / f"{rank}.pid" for rank in (0, 1)]
            try:
                while not all(file.exists() for file in files):
                    assert caller.poll() is None
                    time.sleep(0.02)
                pids = [int(file.read_text()) for file in files]
                assert all(is_running(pid) for pid in pids)
            finally:
                if how is signal.SIGINT:
                    os.killpg(caller.pid, signal.SIGINT)  # as a terminal does it
                else:
                    caller.kill()
            caller.communicate(timeout=60)
        wait_gone(*pids)
