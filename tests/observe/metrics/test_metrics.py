"""Steps reach TensorBoard, Weights & Biases and OpenMetrics, as these read them themselves."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import paceline
from paceline import DistributedDataParallel as DDP
from paceline.observe.metrics import OpenMetrics, TensorBoard, WeightsAndBiases, open_metrics
from paceline.observe.metrics.values import step_values
from paceline.observe.recording import METRICS_PORT
from paceline.observe.run_folder import RUN_DIR
from paceline.testing import run_ranks
from tests.children import begin_in_fork, wait_for
from tests.observe.recorded_training import captured_warnings, make_model, train
from tests.observe.sample_records import make_step
from tests.system import free_port

STEPS = [replace(make_step(n), numbers=(("accuracy", n / 10),), is_skipped=False) for n in (1, 2)]


def test_values() -> None:
    record = replace(
        make_step(3),
        began_ns=1_000_000,
        forward_began_ns=3_000_000,
        forward_ended_ns=6_000_000,
        backward_began_ns=7_000_000,
        backward_ended_ns=11_000_000,
        reduced_ns=16_000_000,
        optimizer_began_ns=17_000_000,
        optimizer_ended_ns=21_000_000,
        samples=40,
        cpu_ns=5_000_000,
        loss=math.nan,
    )
    assert step_values(record) == {
        "input_ms": 2.0,
        "forward_ms": 3.0,
        "backward_ms": 4.0,
        "waiting_ms": 5.0,
        "optimizer_ms": 4.0,
        "step_ms": 20.0,
        "cpu_ms": 5.0,
        "samples_per_s": 2000.0,
    }
    unseen = replace(record, forward_began_ns=0, optimizer_began_ns=0, optimizer_ended_ns=0)
    assert step_values(unseen)["input_ms"] == step_values(unseen)["optimizer_ms"] == 0.0


# TensorBoard's own imports warn on some versions of its dependencies.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard (extra metrics)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        send = TensorBoard(writer)
        for record in STEPS:
            send(record)
        send(replace(STEPS[0], wrapper=1))
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    losses = [(event.step, event.value) for event in found.Scalars("paceline/loss")]
    assert losses == [(1, 1.0), (2, 0.5)]
    assert found.Scalars("paceline/accuracy")[1].value == pytest.approx(0.2)
    assert [event.step for event in found.Scalars("paceline1/step_ms")] == [1]


def log_records(data: bytes) -> Iterator[bytes]:
    """Cut a file in LevelDB's log format, which wandb writes, into its records."""
    block_bytes, offset, record = 32768, 7, b""  # wandb's own header first
    while offset + 7 <= len(data):
        left = block_bytes - offset % block_bytes
        size, kind = struct.unpack_from("<HB", data, offset + 4)
        if left < 7 or kind == 0:  # padding
            offset += left
            continue
        record += data[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def read_wandb(folder: Path) -> list[dict[str, str]]:
    """The rows of an offline run."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows = []
    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): item.value_json for item in items})
    return rows


def log_to_wandb(folder: str) -> None:
    import wandb

    run = wandb.init(project="test", mode="offline", dir=folder)
    run.log({"mine": 1})
    send = WeightsAndBiases(run)
    for record in STEPS:
        send(record)
    run.finish()


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path) -> None:
    """In a rank: wandb leaves a service process and threads until its process ends."""
    pytest.importorskip("wandb", reason="needs wandb (extra metrics)")
    env = {"WANDB_SILENT": "true", "WANDB_MODE": "offline", "PYTHONWARNINGS": None}
    run_ranks(1, log_to_wandb, str(tmp_path), env=env, timeout_s=200)
    rows = read_wandb(tmp_path)
    ours = [row for row in rows if "paceline/step" in row]
    assert [float(row["paceline/step"]) for row in ours] == [1, 2]
    assert [float(row["paceline/loss"]) for row in ours] == [1.0, 0.5]
    assert [float(row["paceline/accuracy"]) for row in ours] == [0.1, 0.2]


class FakeRun:
    """Keeps what a run is told; the real one is in the slow test."""

    def __init__(self) -> None:
        self.defined: list[tuple[str, str]] = []
        self.rows: list[dict[str, float]] = []

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.defined.append((name, step_metric))

    def log(self, data: dict[str, float]) -> None:
        self.rows.append(data)


def test_rows_for_wandb_have_a_step_of_their_own() -> None:
    run = FakeRun()
    send = WeightsAndBiases(run)
    for record in [*STEPS, replace(STEPS[0], wrapper=2)]:
        send(record)
    defined = [("paceline/*", "paceline/step"), ("paceline2/*", "paceline2/step")]
    assert run.defined == defined
    assert [row.get("paceline/step") for row in run.rows] == [1, 2, None]


# --- OpenMetrics ----------------------------------------------------------------------------------


def get(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        return answer.read().decode()


def parse(text: str) -> dict[tuple[str, str], float]:
    parser = pytest.importorskip(
        "prometheus_client.openmetrics.parser", reason="needs prometheus_client"
    )
    return {
        (sample.name, sample.labels.get("phase") or sample.labels.get("name", "")): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("wrapper") == "0"
    }


def test_open_metrics_are_what_prometheus_reads() -> None:
    odd = replace(STEPS[1], loss=math.inf, numbers=(('a "b" \\ \n c', math.nan),))
    with OpenMetrics(rank=3) as metrics:
        assert parse(get(metrics.port)) == {}
        for record in [*STEPS, odd, replace(odd, wrapper=1)]:
            metrics(record)
        found = parse(get(metrics.port))
        assert 'rank="3"' in metrics.text()
    assert found["paceline_steps_total", ""] == 3
    assert found["paceline_samples_total", ""] == 5
    assert found["paceline_loss", ""] == math.inf
    assert found["paceline_logged", "accuracy"] == 0.2
    assert math.isnan(found["paceline_logged", 'a "b" \\ \n c'])
    assert found["paceline_phase_seconds_total", "forward"] == pytest.approx(3e-9)


def test_only_metrics_are_served_and_only_here() -> None:
    with OpenMetrics() as metrics:
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(metrics.port, "/etc/passwd")
        caught.value.close()
        assert caught.value.code == 404
        assert metrics._server is not None
        assert metrics._server.server_address[0] == "127.0.0.1"


def test_a_client_that_says_nothing_holds_nobody_up_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_metrics, "_REQUEST_TIMEOUT_S", 0.2)
    with OpenMetrics() as metrics, socket.create_connection(("127.0.0.1", metrics.port)) as silent:
        assert "# EOF" in get(metrics.port)  # after the time-out of the silent one
        silent.close()


def trickle(metrics: OpenMetrics, stop: threading.Event, began: threading.Event) -> None:
    """Send a request for ever, a byte at a time."""
    with (
        socket.create_connection(("127.0.0.1", metrics.port)) as client,
        contextlib.suppress(OSError),
    ):
        client.sendall(b"GET /metrics HTTP/1.0\r\nX: ")
        began.set()
        while not stop.wait(0.02):
            client.sendall(b"x")


@contextlib.contextmanager
def trickling(metrics: OpenMetrics) -> Iterator[None]:
    stop, began = threading.Event(), threading.Event()
    thread = threading.Thread(target=trickle, args=(metrics, stop, began))
    thread.start()
    try:
        assert began.wait(60)
        yield
    finally:
        stop.set()
        thread.join()


def test_a_client_that_trickles_holds_nobody_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_metrics, "_REQUEST_TIMEOUT_S", 0.2)
    with OpenMetrics() as metrics, trickling(metrics):
        assert "# EOF" in get(metrics.port)


def test_close_hangs_up_on_a_client_that_trickles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_metrics, "_REQUEST_TIMEOUT_S", 1e6)
    monkeypatch.setattr(open_metrics, "_CLOSE_S", 60.0)
    metrics = OpenMetrics()
    server = metrics._server
    assert server is not None
    with trickling(metrics):
        until_s = time.monotonic() + 60
        while server._client is None and time.monotonic() < until_s:
            time.sleep(0.01)
        metrics.close()
        assert not metrics._thread.is_alive()


def test_close_waits_for_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the thread is in."""
    monkeypatch.setattr(open_metrics, "_CLOSE_S", 0.1)
    go_on = threading.Event()
    metrics = OpenMetrics()
    monkeypatch.setattr(metrics, "text", lambda: str(go_on.wait(60)))
    with socket.create_connection(("127.0.0.1", metrics.port)) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        server = metrics._server
        assert server is not None
        until_s = time.monotonic() + 60
        while server._client is None and time.monotonic() < until_s:
            time.sleep(0.01)
        metrics.close()
        assert metrics._thread.daemon
        go_on.set()
        metrics._thread.join(60)
        assert not metrics._thread.is_alive()


def test_closed_means_closed() -> None:
    metrics = OpenMetrics()
    metrics.close()
    metrics.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", metrics.port), timeout=60).close()


def test_a_forked_child_lets_the_port_go() -> None:
    with OpenMetrics() as metrics:

        def child() -> None:
            assert metrics._server is None
            metrics.close()

        assert wait_for(begin_in_fork(child)) == 0
        assert "# EOF" in get(metrics.port)


def serve_and_look() -> dict[tuple[str, str], float]:
    train(DDP(make_model()), 4)
    port = int(os.environ[METRICS_PORT]) + int(os.environ["LOCAL_RANK"])
    return parse(get(port))


def test_by_environment_variable() -> None:
    env = {METRICS_PORT: str(free_port()), RUN_DIR: None}
    (found,) = run_ranks(1, serve_and_look, env=env)
    assert found["paceline_steps_total", ""] == 3  # the fourth is not over


def train_with_warnings() -> list[str]:
    with captured_warnings() as messages:
        train(DDP(make_model()), 2)
    return messages


@pytest.mark.parametrize("port", ["taken", "nonsense", "99999999"])
def test_a_port_that_cannot_be_had_is_said(port: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        number = str(holder.getsockname()[1]) if port == "taken" else port
        env = {METRICS_PORT: number, RUN_DIR: None}
        ((message,),) = run_ranks(1, train_with_warnings, env=env)
    assert "rank 0 serves no metrics" in message
    assert number in message


def test_names() -> None:
    assert paceline.observe.metrics.OpenMetrics is OpenMetrics
