"""``paceline bench hybrid``: every route trains the same model, and the numbers are told."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.cli import main
from paceline.cli.bench import hybrid
from paceline.cli.bench.hybrid import ps_servers
from paceline.cli.bench.hybrid.model import LEARNING_RATE, dense_network, epoch, table_weight
from paceline.cli.bench.hybrid.plan import (
    HybridPlan,
    OptimizerName,
    RouteName,
    choose_port,
    parse_routes,
)
from paceline.cli.bench.hybrid.ranks import EpochSample, TrainerResult, run_process
from paceline.cli.bench.hybrid.report import Report, percentile
from paceline.errors import ConfigurationError
from paceline.launch.kernel import descendants
from paceline.ps.protocol.wire import Kind, read_head
from paceline.ps.storage.journal import read_journal
from paceline.testing import run_ranks

SMALL = ["--embeddings", "40", "--dim", "128", "--warmup-cycles", "1", "--cycles", "2"]
SMALL += ["--launches", "1"]


def plan_of(trainers: int, servers: int, **changes: Any) -> HybridPlan:
    options = {"routes": tuple(RouteName), "embeddings": 40, "dim": 128, "warmup_cycles": 0}
    options |= {"cycles": 3, "launches": 1, "master_addr": "127.0.0.1", **changes}
    port = choose_port("127.0.0.1", 0)
    return HybridPlan(trainers=trainers, servers=servers, master_port=port, **options)


def train(plan: HybridPlan, trainer: int, steps: dict[str, Any]) -> dict[str, Any]:
    """Train every route over the same epochs; return losses and all weights at the end."""
    found = {}
    for name, step in steps.items():
        losses = [
            float(step(batch))
            for cycle in range(plan.cycles)
            for batch in epoch(plan, trainer, cycle)
        ]
        dense = [parameter.detach().clone() for parameter in step.dense.parameters()]
        tables = [table.clone() for table in step.read_tables()]
        found[name] = (losses, dense, tables)
    return {"found": found, "threads": torch.get_num_threads()}


def plan_of_words(*words: str) -> HybridPlan:
    """As the command reads its options."""
    parser = argparse.ArgumentParser()
    hybrid.add_arguments(parser)
    sizes = ["--embeddings", "40", "--dim", "128", "--warmup-cycles", "0", "--cycles", "3"]
    return hybrid._plan(parser.parse_args([*sizes, "--launches", "1", *words]))


def train_on(
    plan: HybridPlan, look: Callable[[HybridPlan], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Run every route; return what each trainer brought. Look before the servers end."""
    whole: list[dict[str, Any]] = [{"found": {}} for _ in range(plan.trainers)]
    for part in plan.parts:
        with ps_servers(part) as addresses:
            part = part.with_ps(addresses).at_port(choose_port("127.0.0.1", 0))
            results = run_ranks(part.world, run_process, part, train, init=False)
            look(part)
        for mine, result in zip(whole, filter(None, results), strict=True):
            mine["found"] |= result["found"]
            mine["threads"] = result["threads"]
    return whole


def pushes_in(journal: Path) -> int:
    number = int(journal.stem.partition("-")[2])
    heads = [read_head(frames[0])[0] for frames in read_journal(journal, number, may_be_torn=False)]
    return sum(head.kind is Kind.PUSH for head in heads)


def train_plainly(plan: HybridPlan) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
    dense = dense_network(plan.seed)
    weights = [nn.Parameter(table_weight(plan, table)) for table in plan.table_order]
    kind = {OptimizerName.SGD: torch.optim.SGD, OptimizerName.ADAGRAD: torch.optim.Adagrad}
    optimizer = kind[plan.optimizer]([*dense.parameters(), *weights], lr=LEARNING_RATE)
    losses = []
    for cycle in range(plan.cycles):
        for batch in epoch(plan, 0, cycle):
            optimizer.zero_grad()
            bags = [F.embedding_bag(batch.indices, w, batch.offsets, mode="sum") for w in weights]
            loss = F.cross_entropy(dense(torch.cat(bags, dim=1)), batch.targets)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses, [p.detach() for p in dense.parameters()], [w.detach() for w in weights]


@pytest.mark.parametrize(
    "words",
    [["--optimizer", "adagrad", "--journal"], pytest.param([], marks=pytest.mark.slow)],
    ids=["adagrad, journal", "sgd"],
)
def test_every_route_trains_like_plain_torch(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one trainer the order of updates is certain, so all weights can be compared."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the servers' journals are
    plan = plan_of_words("--trainers", "1", "--servers", "2", *words)
    pushes: list[int] = []

    def look(part: HybridPlan) -> None:
        if RouteName.PS in part.routes:
            pushes.extend(map(pushes_in, tmp_path.rglob("journal*")))

    [result] = train_on(plan, look)
    steps = len(epoch(plan, 0, 0)) * plan.cycles
    assert pushes == ([steps] * plan.servers if "--journal" in words else [])
    [(losses, dense, tables)] = run_ranks(1, train_plainly, plan, init=False)
    before = [table_weight(plan, table) for table in plan.table_order]
    assert all(not torch.equal(a, b) for a, b in zip(tables, before, strict=True))
    assert set(result["found"]) == {route.value for route in RouteName}
    for found in result["found"].values():
        assert found[0] == pytest.approx(losses, rel=1e-5)
        for mine, theirs in zip([*found[1], *found[2]], [*dense, *tables], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert result["threads"] == 1


@pytest.mark.slow
def test_trainers_stay_equal_and_share_the_tables() -> None:
    plan = plan_of(2, 2, cycles=1)
    first, second = train_on(plan)
    for name, (losses, dense, _) in first["found"].items():
        assert losses != second["found"][name][0], "each has its own data"
        for mine, theirs in zip(dense, second["found"][name][1], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.slow
@pytest.mark.may_leave("descriptors")  # matplotlib keeps its fonts open
def test_table_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers, plot = tmp_path / "hybrid.json", tmp_path / "hybrid.png"
    words = ["bench", "hybrid", *SMALL, "--json", str(numbers), "--plot", str(plot)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert f"torch {torch.__version__}" in out
    assert "p50   ex/s" in out
    told = json.loads(numbers.read_text())
    assert set(told["routes"]) == {route.value for route in RouteName}
    for route in told["routes"].values():
        assert set(route["percentiles"]) == {"0", "1", "all"}
        assert [len(epochs) for epochs in route["epochs"]] == [2, 2]
        middle = route["percentiles"]["all"]["p50"]["seconds"]
        assert f"{middle:.4f}" in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_what_the_report_counts() -> None:
    plan = plan_of(2, 1, routes=(RouteName.RPC_TORCH, RouteName.RPC_PACELINE), cycles=2)
    slow = [EpochSample(2.0, 100, 1.0), EpochSample(4.0, 100, 1.0)]
    fast = [EpochSample(1.0, 100, 1.0), EpochSample(1.0, 100, 1.0)]
    results = [
        TrainerResult(0, {"rpc-torch": slow, "rpc-paceline": fast}, {}),
        TrainerResult(1, {"rpc-torch": fast, "rpc-paceline": fast}, {}),
    ]
    report = Report(plan, results)
    assert report.seconds(RouteName.RPC_TORCH, None) == [2.0, 4.0]
    assert report.rates(RouteName.RPC_TORCH, None) == [100.0, 50.0]
    assert report.rates(RouteName.RPC_TORCH, 0) == [50.0, 25.0]
    comparison = report.comparison()
    assert comparison.speed("rpc-paceline").value == 3.0
    assert comparison.winners == ["rpc-paceline"]
    assert percentile([1.0, 2.0, 3.0], 75) == 2.5


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--dim", "63"], "--dim 63 does not divide 512"),
        (["--dim", "256", "--servers", "3"], "at most --servers 2"),
        (["--route", "ftp"], "--route ftp: there is no such route, choose from"),
        (["--trainers", "0"], "--trainers 0: at least 1"),
        (["--cycles", "0"], "--cycles 0: at least 1"),
        (["--warmup-cycles", "-1"], "--warmup-cycles -1: 0 or more"),
        (["--master-addr", "192.0.2.1"], "must be one of its own"),
        (["--master-port", "70000"], "--master-port 70000"),
    ],
)
def test_bad_arguments(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hybrid", *words]) == 2
    assert text in capsys.readouterr().err


def test_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["bench", "hybrid", "--master-port", port]) == 2
    assert f"--master-port {port} is in use" in capsys.readouterr().err


def test_routes() -> None:
    torch_first = (RouteName.RPC_TORCH, RouteName.RPC_PACELINE)
    assert parse_routes([]) == tuple(RouteName)
    assert parse_routes(["rpc-torch,rpc-paceline", "rpc-torch"]) == torch_first
    assert parse_routes(["rpc-paceline", "rpc-torch"]) == torch_first[::-1]
    with pytest.raises(ConfigurationError, match="no such route"):
        parse_routes(["rpc"])


def test_tables_are_dealt_in_turn() -> None:
    plan = plan_of(1, 3, dim=64)
    assert [plan.tables_of(server) for server in range(3)] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert plan.table_order == [0, 3, 6, 1, 4, 7, 2, 5]


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_running() -> None:
    command = [sys.executable, "-m", "paceline", "bench", "hybrid", "--cycles", "100000"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        _wait_until(lambda: len(descendants(process.pid)) >= 5)  # those that do the work
        time.sleep(1.0)
        started = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "paceline: interrupted; all ranks are stopped"
    assert "Traceback" not in errors
    _wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


def _wait_until(condition: Any, timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.05)
