"""``paceline ps``: serve, stats and keys, as a user calls them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline import ps
from paceline.cli import main
from paceline.errors import ServerStartError
from paceline.ps.protocol.settings import ServerSettings
from paceline.ps.protocol.table_spec import TableSpec
from paceline.ps.server.options import parse_bytes
from paceline.testing import warm_up
from tests.ps.raw_client import RawClient

SOURCE = Path(__file__).parents[2] / "src"


def paceline(*words: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", "ps", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )


def output(*words: str) -> tuple[int, str, str]:
    """Call the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(["ps", *words])
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


@contextmanager
def serving(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = paceline("serve", *words)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        yield process, line.partition("serving at ")[2].strip()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def local_server(tmp_path: Path) -> Iterator[str]:
    warm_up()
    with ps.local(1, start_method="forkserver") as servers:
        with RawClient(servers.addresses[0]) as client:
            for number in range(40):  # more than fit into one answer
                client.attach(TableSpec(f"table {number}", 10, 4))
            client.lookup(3, TableSpec("table 3", 10, 4), [1, 2])
        yield servers.addresses[0]


@pytest.mark.parametrize("words", [["serve"], ["stats"], ["keys"]])
def test_help_has_an_example(words: list[str]) -> None:
    code, out, _ = output(*words, "--help")
    assert code == 0
    assert f"example:\n  paceline ps {words[0]}" in out


def test_help_imports_neither_torch_nor_zmq() -> None:
    script = (
        "import sys\nfrom paceline.cli import main\n"
        "try:\n    main(['ps', 'serve', '--help'])\nexcept SystemExit:\n    pass\n"
        "print('\\n', [name for name in ('torch', 'zmq', 'numpy') if name in sys.modules])"
    )
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    run = [sys.executable, "-c", script]
    found = subprocess.run(run, env=environ, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1].strip() == "[]"


def test_serve_until_ctrl_c(tmp_path: Path) -> None:
    """Serves, refuses a second server at its address, ends at once, leaves a snapshot."""
    address, state = f"ipc://{tmp_path}/socket", tmp_path / "state"
    with serving(address, "--dir", str(state)) as (process, found):
        assert found == address
        with RawClient(address) as client:
            client.attach(TableSpec("t", 10, 4))
            assert client.hello()["durable"]
        with pytest.raises(ServerStartError, match="the address is in use"):
            start_here(ServerSettings(address))
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "paceline ps: ended" in out
    assert not (tmp_path / "socket").exists()
    assert [path.name for path in state.glob("snapshot-*")] == ["snapshot-00000001.safetensors"]


def start_here(settings: ServerSettings) -> None:
    from paceline.ps.server.dispatch import Handler
    from paceline.ps.server.loop import Server
    from paceline.ps.server.save_root import SaveRoot
    from paceline.ps.state.store import Store

    Server(settings, Handler(Store(1, 1), None, SaveRoot(None)), None).close()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["tcp://127.0.0.1:7077"], "needs keys"),
        (["http://x"], "an address is ipc://PATH or tcp://HOST:PORT"),
        (["ipc:///tmp/x", "--fsync"], "fsync without a directory"),
        (["ipc://" + "x" * 200], "at most 100 bytes"),
        (["tcp://127.0.0.1:7077", "--keys", "/nonexistent"], "paceline ps keys DIR"),
    ],
)
def test_serve_says_what_is_wrong(words: list[str], text: str) -> None:
    code, _, err = output("serve", *words)
    assert code == 2
    assert text in err
    assert "Traceback" not in err


def test_stats(local_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = output("stats", local_server, "--json")
    assert code == 0
    (found,) = json.loads(out)
    assert found["address"] == local_server
    assert [table["name"] for table in found["tables"]] == [f"table {n}" for n in range(40)]
    busy = found["tables"][3]
    assert (busy["lookups"], busy["ids"], busy["pushes"]) == (1, 2, 0)
    assert busy["lookup_p50_us"] > 0
    assert busy["push_p99_us"] is None
    code, out, _ = output("stats", local_server)
    assert code == 0
    assert "memory only" in out
    assert "table 39" in out


def test_stats_of_nobody(tmp_path: Path) -> None:
    code, out, _ = output("stats", f"ipc://{tmp_path}/nobody", "--timeout", "0.2")
    assert code == 1
    assert "no answer within 0.2 s" in " ".join(out.split())
    code, _, err = output("stats", "tcp://127.0.0.1:1")
    assert code == 1
    assert "--keys DIR" in err


def test_keys(tmp_path: Path) -> None:
    code, out, _ = output("keys", str(tmp_path / "k"))
    assert code == 0
    assert f"--keys {tmp_path}/k/server" in out
    secret = (tmp_path / "k" / "server" / "server.key").read_text().strip()
    assert secret not in out
    code, _, err = output("keys", str(tmp_path / "k"))
    assert code == 2
    assert "take another --client NAME" in err


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("2k", 2048), ("500M", 500 << 20), ("12G", 12 << 30)]
)
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count
