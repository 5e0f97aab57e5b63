"""The training that elastic jobs with shards run, and its undisturbed counterpart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import paceline
from paceline import DistributedDataParallel as DDP
from tests.shards.trainings import CASES, MICRO, Case, Data, Small, adamw, digest, run_round

ELASTIC = CASES | {
    "cnn with dropout": Case(
        lambda: nn.Sequential(Small(), nn.Dropout(0.2)),
        adamw,
        {"bucket_cap_mb": 0.0005},
        decays=True,
    )
}


class Training:
    """Model, optimizers and data of a case, the same wherever it runs."""

    def __init__(self, name: str) -> None:
        self.case = ELASTIC[name]
        torch.manual_seed(0)
        self.model = self.case.make().to(self.case.dtype)
        self.ddp = DDP(self.model, shards=self.case.shards, **self.case.ddp)
        self.optimizers = self.case.optimizers(self.model)
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 3, 0.9) for o in self.optimizers]
        data = Data(self.case.shards * MICRO * 4)
        self.loader = paceline.ShardLoader(data, self.ddp, MICRO, seed=4)

    @property
    def steps_in_epoch(self) -> int:
        return self.loader.rounds // self.case.accumulate

    def update(self) -> None:
        if self.case.clips:
            paceline.clip_grad_norm_(self.model.parameters(), 0.5)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            if self.case.decays:
                scheduler.step()
            optimizer.zero_grad()

    def digest(self) -> str:
        return digest(self.model, self.optimizers)


def train(name: str, steps: int) -> str:
    """Train on this rank without elastic; return the digest of what it ends with."""
    training = Training(name)
    batches: Iterator[Any] = iter(())
    for step in range(steps):
        training.loader.set_epoch(step // training.steps_in_epoch)
        if step % training.steps_in_epoch == 0:
            batches = iter(training.loader)
        for _ in range(training.case.accumulate):
            run_round(training.case, training.ddp, next(batches))
        training.update()
    return training.digest()
