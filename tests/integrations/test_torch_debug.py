"""A page of torch's debug server, asked for over HTTP while a rank is late."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline import DistributedDataParallel as DDP
from paceline.errors import ConfigurationError
from paceline.testing import run_ranks
from tests.cli.launched import until
from tests.ddp.compare import batch
from tests.ddp.models import mlp


def show() -> str:
    """Start torch's front end with our page in it, and ask for that page."""
    from torch.distributed.debug._frontend import FrontendServer

    from paceline.integrations.torch_debug import DoctorHandler

    front_end = FrontendServer(0, [DoctorHandler()])
    try:
        address = f"http://localhost:{front_end._server.server_port}/paceline"
        with urllib.request.urlopen(address, timeout=60) as answer:
            return str(answer.read().decode())
    finally:
        front_end._server.shutdown()
        front_end._server.server_close()
        front_end.join()


def late_rank() -> str:
    ddp = DDP(mlp(4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    found = ""
    for step in range(6):
        if step == 4 and dist.get_rank() == 1:
            until(lambda: "waiting for other ranks" in show(), "nobody waits")
            found = show()
        optimizer.zero_grad()
        ddp(batch(step)).square().mean().backward()
        optimizer.step()
    return found


def test_the_late_rank_is_on_the_page(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.debug", reason="this torch has no debug server")
    _, page = run_ranks(2, late_rank, env={"PACELINE_RUN_DIR": str(tmp_path)})
    assert "Rank 1" in page
    assert "waiting for other ranks" in page
    assert '<a href="/paceline">Paceline</a>' in page


def test_without_a_run_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.integrations.torch_debug import DoctorHandler

    monkeypatch.delenv("PACELINE_RUN_DIR", raising=False)
    with pytest.raises(ConfigurationError, match="paceline run"):
        DoctorHandler()
