"""Every command has ``--help`` with an example, and every example works.

Generic over all commands and their subcommands: a new one is found by itself. Examples run as a
user types them, in an empty directory, in order, and all of them exit with 0. Most take long, so
they are ``slow``; those of ``ps`` need a server, and have a test of their own. Where an example
names a host, it is this one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli import COMMANDS, EXAMPLE
from tests.system import free_port

DEADLINE_S = 280
ROOT = Path(__file__).parents[2]
EXAMPLE_LINE = re.compile(r"^  (paceline .*)$", re.MULTILINE)
# What an example shows beside what the command is called with: two spaces or more, then words.
REMARK = re.compile(r"\s{2,}.*$")


@functools.cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    """All commands and subcommands by their words."""
    found: dict[str, argparse.ArgumentParser] = {}
    for name in COMMANDS:
        parser = argparse.ArgumentParser(prog=f"paceline {name}")
        importlib.import_module(f"paceline.cli.{name}").add_arguments(parser)
        found |= dict(with_subcommands(name, parser))
    return found


def with_subcommands(
    words: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                yield from with_subcommands(f"{words} {name}", subparser)


def leaves() -> list[str]:
    """Commands that do something themselves."""
    return [w for w in parsers() if not any(other.startswith(w + " ") for other in parsers())]


def examples_above() -> list[str]:
    """Those of ``paceline`` itself, and of commands that only have others below them."""
    above = [parser.format_help() for words, parser in parsers().items() if words not in leaves()]
    return [line for text in (EXAMPLE, *above) for line in examples_in(text)]


def examples_in(text: str) -> list[str]:
    return [REMARK.sub("", line) for line in EXAMPLE_LINE.findall(text)]


@pytest.mark.parametrize("words", leaves())
def test_help_has_an_example_of_its_own(words: str) -> None:
    lines = examples_in(parsers()[words].format_help())
    assert lines, f"paceline {words} --help has no example"
    assert all(line.startswith(f"paceline {words}") for line in lines)


@pytest.mark.parametrize("words", leaves())
def test_examples_are_understood(words: str) -> None:
    """Cheaply: the options exist and take these values."""
    parser = parsers()[words]
    for line in examples_in(parser.format_help()):
        parser.parse_args(shlex.split(line)[1 + len(words.split()) :])


def test_examples_above_are_understood() -> None:
    for line in examples_above():
        command = next(w for w in leaves() if line.startswith(f"paceline {w}"))
        parsers()[command].parse_args(shlex.split(line)[1 + len(command.split()) :])


def test_nobody_reads_the_help() -> None:
    """``paceline --help | true``: no complaint of Python."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "paceline", "--help"]
    try:
        done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, timeout=DEADLINE_S)
    finally:
        os.close(writer)
    assert done.stderr == b""


def start(line: str, folder: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "paceline", *shlex.split(line)[1:]]
    (folder / "runtime").mkdir(exist_ok=True)  # where jobs are listed: others may hang
    return subprocess.Popen(
        words,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "COLUMNS": "100",
            "BROWSER": "true",
            "XDG_RUNTIME_DIR": str(folder / "runtime"),
        },
    )


def finish(process: subprocess.Popen[str], line: str) -> str:
    """Wait for its end; return what it printed."""
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        kill(process)
    assert process.returncode == 0, f"{line}\n{output}"
    assert "Traceback" not in output, f"{line}\n{output}"
    return output


def needs(words: str) -> None:
    if words.startswith("ps"):
        pytest.importorskip("zmq", reason="needs pyzmq")
    if words == "demo":
        pytest.importorskip("sklearn", reason="needs scikit-learn")


SAME_BITS = "examples/same_bits.py --epochs 2 --save"
RUN_BOTH = (
    f"paceline run -n 1 --run-dir paceline-runs/my-run {SAME_BITS} one-rank.pt",
    f"paceline run -n 4 --run-dir paceline-runs/other {SAME_BITS} four-ranks.pt",
)
RUN_FIRST = "paceline run -n 2 --run-dir paceline-runs/my-run examples/train_mlp.py --epochs 2"


def furnish(words: str, folder: Path) -> None:
    """Put there what the examples take for granted: scripts, or a run that has been."""
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "my").mkdir()
    shutil.copy(UNEDITED, folder / "my" / "training.py")
    shutil.copy(ROOT / "src/paceline/cli/bench/example_model.py", folder / "my" / "module.py")
    (folder / "elastic").mkdir()
    if words == "verify":
        for line in RUN_BOTH:
            finish(start(line, folder), line)
        for name, run in (("RUN", "my-run"), ("OTHER", "other")):
            (folder / name).symlink_to(folder / "paceline-runs" / run)
    if words in ("report", "doctor"):
        finish(start(RUN_FIRST, folder), RUN_FIRST)
        for name in ("RUN", "BEFORE", "AFTER"):
            (folder / name).symlink_to(folder / "paceline-runs" / "my-run")


UNEDITED = ROOT / "tests" / "integrations" / "unedited.py"
ELASTIC = """
import runpy, sys
sys.argv[1:] = ["elastic", '{"steps": 20}']
runpy.run_path(%r, run_name="__main__")
"""


def run_example(line: str, folder: Path) -> None:
    """Run it with a ``train.py`` as it takes for granted; ``--patch`` meets torch's DDP."""
    elastic = ELASTIC % str(ROOT / "tests" / "elastic" / "script.py")
    (folder / "train.py").write_text(elastic if "--elastic" in line else UNEDITED.read_text())
    output = finish(start(line, folder), line)
    if "train.py" in line and "--elastic" not in line:
        wrapper = "paceline.ddp.wrapper" if "--patch" in line else "torch.nn.parallel"
        assert wrapper in output, f"{line}\n{output}"


def run_on_hosts(lines: list[str], folder: Path) -> None:
    """The lines of all hosts at once; each of them is this host."""
    endpoint = f"127.0.0.1:{free_port()}"
    (folder / "train.py").write_text(UNEDITED.read_text())
    here = [re.sub(r"node0:\d+", endpoint, line) for line in lines]
    launchers = [start(line, folder) for line in here]
    with contextlib.ExitStack() as stack:
        for launcher in launchers:
            stack.callback(kill, launcher)
        outputs = [finish(*pair) for pair in zip(launchers, here, strict=True)]
    assert "torch.nn.parallel" in outputs[0]


def kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@contextlib.contextmanager
def elastic_job(folder: Path) -> Iterator[None]:
    """A job that trains for as long as this is entered, in the folder that an example names."""
    script = ROOT / "tests" / "elastic" / "script.py"
    plan = '{"steps": 1000000, "pause_s": 0.05}'
    run = folder / "paceline-runs" / "20260101-train-17"
    (folder / "out").mkdir()
    job = start(f"paceline run --elastic -n 2 --run-dir {run} {script} out '{plan}'", folder)
    try:
        until_s = time.monotonic() + 120
        while not (run / "membership.jsonl").exists():  # written in the first epoch
            assert job.poll() is None, job.communicate()[0]
            assert time.monotonic() < until_s
            time.sleep(0.05)
        yield
    finally:
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", [w for w in leaves() if not w.startswith("ps ")])
def test_examples_work(words: str, tmp_path: Path) -> None:
    needs(words)
    furnish(words, tmp_path)
    with elastic_job(tmp_path) if words == "scale" else contextlib.nullcontext():
        lines = examples_in(parsers()[words].format_help())
        for line in lines:
            if "--nnodes" not in line:
                run_example(line, tmp_path)
    if on_hosts := [line for line in lines if "--nnodes" in line]:
        run_on_hosts(on_hosts, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("line", [x for x in examples_above() if " ps " not in x])
def test_examples_above_work(line: str, tmp_path: Path) -> None:
    words = line.split()[1]
    needs(words)
    furnish(words, tmp_path)
    run_example(line, tmp_path)


def test_examples_of_ps_work(tmp_path: Path) -> None:
    """Keys, a server, then its stats: each as its --help shows it, at addresses of this test."""
    needs("ps")
    address = tmp_path / "t.sock"
    for words in ("ps keys", "ps serve", "ps stats"):
        assert examples_in(parsers()[words].format_help())
    for line in examples_in(parsers()["ps keys"].format_help()):
        finish(start(line, tmp_path), line)
    serving, *_ = examples_in(parsers()["ps serve"].format_help())
    server = start(re.sub(r"(ipc|tcp)://\S+", f"ipc://{address}", serving), tmp_path)
    try:
        until_s = time.monotonic() + 120
        while not address.is_socket():
            assert server.poll() is None, server.communicate()[0]
            assert time.monotonic() < until_s
            time.sleep(0.05)
        asking, *_ = examples_in(parsers()["ps stats"].format_help())
        line = re.sub(r"(ipc|tcp)://\S+", f"ipc://{address}", asking)
        finish(start(line, tmp_path), line)
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
