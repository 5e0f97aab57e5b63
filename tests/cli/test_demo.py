"""The command line: help, the demo, its errors, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from paceline.cli import demo, main
from paceline.launch.kernel import descendants
from tests.cli.launched import until

DEADLINE_S = 250


def paceline(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


class TestHelp:
    def test_top_level_names_commands_and_shows_an_example(self) -> None:
        result = paceline("--help")
        assert result.returncode == 0
        assert "paceline bench ddp --model" in result.stdout

    def test_needs_no_torch(self) -> None:
        code = (
            "import contextlib, sys\n"
            "from paceline.cli import main\n"
            "with contextlib.suppress(SystemExit): main(['--help'])\n"
            "sys.exit('torch' in sys.modules)"
        )
        assert (
            subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
        )

    @pytest.mark.parametrize("words", [[], ["demo", "--ranks", "0"]])
    def test_wrong_usage(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert "usage: paceline" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("word", "hint"), [("reprot", "did you mean report?"), ("xyz", "there are run, scale, ")]
    )
    def test_a_command_that_is_not_there(
        self, word: str, hint: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([word, "x"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"paceline: there is no command {word}; {hint}")


class TestDemo:
    def test_learns_and_reports(self) -> None:
        pytest.importorskip("sklearn", reason="needs scikit-learn")
        result = paceline("demo")
        assert result.returncode == 0, result.stdout + result.stderr
        assert "2 ranks, 92 steps with each" in result.stdout
        for text in ("x as fast", "memory above the weights", "accuracy", "rank 0,"):
            assert text in result.stdout
        torchs, ours = result.stdout.split("╭─ torch DDP")[1].split("╭─ Paceline")
        assert "RuntimeError" in torchs
        assert "PeerLostError" in ours
        assert "rank 1 (pid" in " ".join(ours.replace("│", " ").split())
        assert "training: 16 of 16, loss" in result.stderr
        assert "Traceback" not in result.stderr

    @pytest.mark.slow
    def test_says_when_it_did_not_learn(self) -> None:
        pytest.importorskip("sklearn", reason="needs scikit-learn")
        result = paceline("demo", "--epochs", "1", "--ranks", "1")
        assert result.returncode == 1
        assert "accuracy is below 93%" in result.stdout
        assert "killed" not in result.stdout, "one rank has nobody who could say something"

    def test_without_sklearn(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
        assert main(["demo"]) == 2
        assert "pip install scikit-learn" in capsys.readouterr().err

    @pytest.mark.slow  # in `make test`: test_all_ends of test_run.py
    def test_ctrl_c_stops_everything(self) -> None:
        pytest.importorskip("sklearn", reason="needs scikit-learn")
        command = [sys.executable, "-m", "paceline", "demo", "--epochs", "10000"]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            until(lambda: len(descendants(process.pid)) >= 2, "no rank has started")
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
            _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert errors.endswith("paceline: interrupted; all ranks are stopped\n")
        assert "Traceback" not in errors
        assert wait_group_gone(process.pid)


def wait_group_gone(group: int, within_s: float = 60.0) -> bool:
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False
