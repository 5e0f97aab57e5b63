"""The command line: help, the demo, its errors, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from paceline.cli import demo, main

DEADLINE_S = 250


def paceline(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


class TestHelp:
    def test_top_level_names_commands_and_shows_an_example(self) -> None:
        result = paceline("--help")
        assert result.returncode == 0
        assert "paceline demo --ranks 2" in result.stdout

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

    def test_demo(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="0"):
            main(["demo", "--help"])
        assert "--plain-torch" in capsys.readouterr().out

    @pytest.mark.parametrize("words", [[], ["no-such-command"], ["demo", "--ranks", "0"]])
    def test_wrong_usage(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert "usage: paceline" in capsys.readouterr().err


class TestDemo:
    @pytest.mark.parametrize(
        ("options", "engine"),
        [
            ((), "Paceline"),
            pytest.param(("--plain-torch",), "torch DDP", marks=pytest.mark.slow),
        ],
    )
    def test_learns_and_reports(self, options: tuple[str, ...], engine: str) -> None:
        pytest.importorskip("sklearn", reason="needs scikit-learn")
        result = paceline("demo", "--epochs", "8", *options)
        assert result.returncode == 0, result.stdout + result.stderr
        for text in (f"{engine}, 2 ranks", "accuracy", "step time", "KiB", "epoch 8, step"):
            assert text in result.stdout
        assert result.stderr == ""

    def test_says_when_it_did_not_learn(self) -> None:
        pytest.importorskip("sklearn", reason="needs scikit-learn")
        result = paceline("demo", "--epochs", "1")
        assert result.returncode == 1
        assert "accuracy is below 97%" in result.stdout

    def test_without_sklearn(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
        assert main(["demo"]) == 2
        assert "pip install scikit-learn" in capsys.readouterr().err

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
            process.stdout.readline()  # the ranks are starting, or training by now
            time.sleep(1.0)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
            _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert errors == "paceline: interrupted; all ranks are stopped\n"
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
