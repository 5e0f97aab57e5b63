"""Real ranks, a real recorder, a delay put into one phase of one rank: the report must name both.

A rank that sleeps is late on any machine; still, a machine that is busy enough could hide it, so
these are ``slow``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel
from paceline.report.analysis import analyse
from paceline.report.causes import Cause
from paceline.report.phases import Phase
from paceline.report.run import RunState, read_run
from paceline.testing import run_ranks

STEPS = 10
DELAY_S = 0.15
CULPRIT = 1


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(DELAY_S)
        return gradient


class Net(nn.Module):
    def __init__(self, slow: Phase | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.slow = slow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at, layer in enumerate(self.layers):
            x = layer(x)
            if at == 1 and self.slow is Phase.FORWARD:
                time.sleep(DELAY_S)
            if at == 1 and self.slow is Phase.BACKWARD:
                x = SlowBackward.apply(x)
        return x


class SlowSGD(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        time.sleep(DELAY_S)
        super().step()


def train(folder: Path, phase: Phase) -> None:
    os.environ["PACELINE_RUN_DIR"] = str(folder)
    slow = phase if torch.distributed.get_rank() == CULPRIT else None
    ddp = DistributedDataParallel(Net(slow))
    optimizer = (SlowSGD if slow is Phase.OPTIMIZER else torch.optim.SGD)(ddp.parameters(), lr=0.01)
    for _ in range(STEPS):
        if slow is Phase.INPUT:
            time.sleep(DELAY_S)
        loss = ddp(torch.ones(4, 64)).square().mean()
        if slow is Phase.LOSS:
            time.sleep(DELAY_S)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.alone
@pytest.mark.parametrize(
    "phase",
    [Phase.INPUT, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER],
    ids=lambda phase: phase.value,
)
def test_rank_and_phase_are_named(tmp_path: Path, phase: Phase) -> None:
    run_ranks(2, train, tmp_path, phase, timeout_s=120)
    run = read_run(tmp_path)
    assert run.state is RunState.FINISHED
    found = analyse(run).analysis
    assert found.culprit is not None
    straggler = found.culprit.straggler
    assert (straggler.rank, straggler.phase) == (CULPRIT, phase)
    assert straggler.per_step_ms >= 0.7 * 1000 * DELAY_S
    expected = Cause.DATA_LOADER if phase is Phase.INPUT else Cause.BLOCKED
    assert found.culprit.diagnosis.cause is expected
