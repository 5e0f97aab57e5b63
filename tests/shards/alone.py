"""The training that elastic jobs with shards run, and its undisturbed counterpart."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

import paceline
from paceline.observe.run_folder import RUN_DIR
from tests.shards.drawn import Drawn
from tests.shards.models import Small
from tests.shards.trainings import (
    CASES,
    LONG,
    Case,
    Data,
    adamw,
    digest,
    make_schedule,
    run_round,
)

ELASTIC = (
    CASES
    | LONG
    | {
        "cnn with dropout": Case(
            lambda: nn.Sequential(Small(), nn.Dropout(0.2)),
            adamw,
            {"bucket_cap_mb": 0.0005},
            decays=True,
        )
    }
)


class Training:
    """Model, optimizers and data of a case, the same wherever it runs."""

    def __init__(self, case: Case, transport: str = "auto") -> None:
        self.case = case
        self.model = case.model()
        self.ddp = case.wrap(self.model, transport)
        self.optimizers = case.optimizers(self.model)
        self.schedulers = [make_schedule(each) for each in self.optimizers]
        data = Data(case.shards * case.micro * 4)
        self.loader = paceline.ShardLoader(data, self.ddp, case.micro, seed=4)

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


def train_recorded(name: str, steps: int, folder: str) -> str:
    """The same, with checksums in a run folder."""
    os.environ[RUN_DIR] = folder
    return train_named(name, steps)


def train_named(name: str, steps: int) -> str:
    """The same by name."""
    return train(ELASTIC[name], steps)


def train(case: Case | Drawn, steps: int) -> str:
    """Train on this rank without elastic; return the digest of what it ends with."""
    warnings.filterwarnings("ignore", "Sparse invariant checks")  # by Adagrad
    training = Training(case.case() if isinstance(case, Drawn) else case)
    batches: Iterator[Any] = iter(())
    for step in range(steps):
        training.loader.set_epoch(step // training.steps_in_epoch)
        if step % training.steps_in_epoch == 0:
            batches = iter(training.loader)
        for _ in range(training.case.accumulate):
            run_round(training.case, training.ddp, next(batches))
        training.update()
    return training.digest()
