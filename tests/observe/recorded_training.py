"""A small model, its training, and what was recorded meanwhile: for the tests of the recorder."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline
from paceline import DistributedDataParallel as DDP
from paceline.observe.records import RankHistory
from paceline.observe.ring import read_history
from paceline.observe.run_folder import RUN_DIR, RunFolder
from paceline.testing import run_ranks


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def train(model: DDP, steps: int, batch: int = 5) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(batch, 4)).square().mean()
        loss.backward()
        optimizer.step()
        paceline.log(loss=loss)
    return optimizer


def record(tmp_path: Path, fn: Callable[..., Any], *args: Any, ranks: int = 2) -> list[RankHistory]:
    """Run ``fn`` in ranks that record; return their histories."""
    run_ranks(ranks, fn, *args, env={RUN_DIR: str(tmp_path / "run")}, timeout_s=120)
    folder = RunFolder(tmp_path / "run")
    return [read_history(folder.events(rank)) for rank in folder.ranks()]


@contextlib.contextmanager
def captured_warnings() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: found.append(entry.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("paceline")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
