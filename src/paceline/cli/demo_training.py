"""What each rank of ``paceline demo`` does: an ordinary DDP training script.

Called in the ranks by :mod:`paceline.cli.demo`. Rank 0 also draws the progress.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from paceline import DistributedDataParallel

BATCH = 64  # over all ranks
PLAIN_LINES = 6  # how many lines of progress there are when nobody watches live


@dataclass(frozen=True)
class Digits:
    """Images (n, 1, 8, 8) in 0..1 and labels, for training and held out."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


@dataclass(frozen=True)
class Recipe:
    """How to train."""

    epochs: int
    seed: int
    plain_torch: bool


@dataclass(frozen=True)
class Outcome:
    """What a rank brings home; everything but the times is the same on every rank."""

    engine: str
    correct: int
    held_out: int
    parameters: int
    steps: int
    train_s: float
    step_ms: float
    step_bytes: int
    total_bytes: int
    buckets: int | None
    travelled_over: str

    @property
    def accuracy(self) -> float:
        """The part of the held-out images that were recognised."""
        return self.correct / self.held_out


def train(digits: Digits, recipe: Recipe) -> Outcome:
    """Train this rank's share, evaluate together, and return what happened."""
    torch.manual_seed(recipe.seed)
    wrap = nn.parallel.DistributedDataParallel if recipe.plain_torch else DistributedDataParallel
    model = wrap(_network())
    start_s = time.perf_counter()
    step_times_s = _fit(model, digits, recipe)
    train_s = time.perf_counter() - start_s
    correct = _count_correct(model, digits)
    step_bytes, total_bytes, buckets = _reduced(model, len(step_times_s))
    return Outcome(
        engine="torch DDP" if recipe.plain_torch else "Paceline",
        correct=correct,
        held_out=len(digits.test_labels),
        parameters=sum(p.numel() for p in model.parameters()),
        steps=len(step_times_s),
        train_s=train_s,
        step_ms=statistics.median(step_times_s) * 1e3,
        step_bytes=step_bytes,
        total_bytes=total_bytes,
        buckets=buckets,
        travelled_over=_travelled_over(model),
    )


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def _fit(model: nn.Module, digits: Digits, recipe: Recipe) -> list[float]:
    """Train, and return the seconds that each step took."""
    data = TensorDataset(digits.train_images, digits.train_labels)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        data, seed=recipe.seed
    )
    loader = DataLoader(data, batch_size=max(1, BATCH // dist.get_world_size()), sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=4e-3, total_steps=recipe.epochs * len(loader)
    )
    times_s: list[float] = []
    with _progress(recipe.epochs * len(loader)) as progress:
        for epoch in range(recipe.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                start_s = time.perf_counter()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                times_s.append(time.perf_counter() - start_s)
                schedule.step()
                progress.update(epoch + 1, loss.item())
    return times_s


def _count_correct(model: nn.Module, digits: Digits) -> int:
    """Count over all ranks; each looks at its own part of the held-out images."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    model.eval()
    with torch.no_grad():
        guesses = model(digits.test_images[mine]).argmax(dim=1)
    correct = (guesses == digits.test_labels[mine]).sum()
    dist.all_reduce(correct)
    return int(correct)


def _reduced(model: nn.Module, steps: int) -> tuple[int, int, int | None]:
    """Return the bytes reduced in a step and in all, and in how many buckets if that is known."""
    if isinstance(model, DistributedDataParallel):
        stats = model.stats()
        return sum(b.bytes for b in stats.buckets), stats.reduced_bytes, len(stats.buckets)
    step_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return step_bytes, step_bytes * steps, None


def _travelled_over(model: nn.Module) -> str:
    if not isinstance(model, DistributedDataParallel):
        return f"c10d:{dist.get_backend()}"
    stats = model.stats()
    return "shared memory" if stats.transport == "shm" else stats.transport


class _Bar:
    """Shows progress: a live bar on a terminal, else a few plain lines, on other ranks nothing."""

    def __init__(self, total_steps: int, progress: Progress | None) -> None:
        self._progress = progress
        self._total = total_steps
        self._done = 0
        self._every = max(1, total_steps // PLAIN_LINES)
        if progress is not None:
            self._task = progress.add_task("", total=total_steps, loss=float("nan"), epoch=1)

    def update(self, epoch: int, loss: float) -> None:
        """Count one step."""
        self._done += 1
        if self._progress is None:
            return
        self._progress.update(self._task, completed=self._done, loss=loss, epoch=epoch)
        is_due = self._done % self._every == 0 or self._done == self._total
        if is_due and not self._progress.console.is_terminal:
            print(f"epoch {epoch}, step {self._done} of {self._total}, loss {loss:.4f}", flush=True)


@contextlib.contextmanager
def _progress(total_steps: int) -> Iterator[_Bar]:
    if dist.get_rank() != 0:
        yield _Bar(total_steps, None)
        return
    console = Console()
    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield _Bar(total_steps, progress)
