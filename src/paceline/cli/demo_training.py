"""What each rank of ``paceline demo`` does: an ordinary DDP training, and one that is killed.

Called in the ranks by :mod:`paceline.cli.demo`. torch's DDP and Paceline's have rank sets of their
own, which take turns of a few steps, so that the ratio of their step times is fair.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from paceline import DistributedDataParallel
from paceline.cli.bench.harness import malloc
from paceline.cli.bench.harness.progress import RoundBar
from paceline.cli.bench.harness.rank_sets import RankSets
from paceline.cli.bench.harness.resident import reset_high_water_mark, resident_bytes

TORCH, PACELINE = "torch DDP", "Paceline"
WRAPPERS = {TORCH: nn.parallel.DistributedDataParallel, PACELINE: DistributedDataParallel}
BATCH = 64  # over all ranks
TURN = 6  # steps
RETURNED_ABOVE_BYTES = 64 * 1024
KILLED = "killed"


@dataclass(frozen=True)
class Digits:
    """Images (n, 1, 8, 8) in 0..1 and labels, for training and held out."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


@dataclass(frozen=True)
class Recipe:
    """How to train: the same with both wrappers."""

    ranks: int
    epochs: int
    seed: int


@dataclass(frozen=True)
class DemoOutcome:
    """What a rank returns.

    Attributes:
        wrapper: A key of :data:`WRAPPERS`.
        accuracy: The part of the held-out images that is recognised; the same on every rank.
        turns_ms: Milliseconds of each step, by turn.
        travelled_over: What gradients travelled over.
    """

    wrapper: str
    turns_ms: list[list[float]]
    accuracy: float
    travelled_over: str


def train(digits: Digits, recipe: Recipe) -> DemoOutcome:
    """Train in turn with the other wrapper's ranks, evaluate, and return what happened."""
    sets = RankSets(recipe.ranks, list(WRAPPERS))
    torch.manual_seed(recipe.seed)
    model = WRAPPERS[sets.name](_network(), process_group=sets.group)
    return DemoOutcome(
        wrapper=sets.name,
        turns_ms=_fit(model, digits, recipe, sets),
        accuracy=_accuracy(model, digits),
        travelled_over=_travelled_over(model),
    )


def _network() -> nn.Module:
    """9 MB of gradients in 22 parameters."""
    layers: list[nn.Module] = [nn.Flatten()]
    for width, following in pairwise((64, 768, 768, 768, 768, 768)):
        layers += [nn.Linear(width, following), nn.LayerNorm(following), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(768, 10))


def _fit(model: nn.Module, digits: Digits, recipe: Recipe, sets: RankSets) -> list[list[float]]:
    """Train turn by turn; return the milliseconds of each step."""
    data = TensorDataset(digits.train_images, digits.train_labels)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        data, num_replicas=recipe.ranks, rank=sets.rank, seed=recipe.seed
    )
    loader = DataLoader(data, batch_size=max(1, BATCH // recipe.ranks), sampler=sampler)
    total = recipe.epochs * len(loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=total)
    batches = _batches(loader, sampler, recipe.epochs)
    loss_of_turn = float("nan")

    def turn() -> list[float]:
        nonlocal loss_of_turn
        times_ms = []
        for images, labels in itertools.islice(batches, TURN):
            start_s = time.perf_counter()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times_ms.append((time.perf_counter() - start_s) * 1e3)
            schedule.step()
            loss_of_turn = loss.item()
        return times_ms

    turns_ms: list[list[float]] = []
    with RoundBar("training", -(-total // TURN), is_shown=dist.get_rank() == 0) as bar:
        for number in range(bar.rounds):
            names = list(WRAPPERS)[:: 1 if number % 2 else -1]
            turns_ms += [found for name in names if (found := sets.on_turn(name, turn))]
            bar.advance(f"loss {loss_of_turn:.3f}")
    return turns_ms


def _batches(
    loader: DataLoader[tuple[torch.Tensor, ...]],
    sampler: DistributedSampler[tuple[torch.Tensor, ...]],
    epochs: int,
) -> Iterator[tuple[torch.Tensor, ...]]:
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        yield from loader


def _accuracy(model: nn.Module, digits: Digits) -> float:
    model.eval()
    with torch.no_grad():
        guesses = model(digits.test_images).argmax(dim=1)
    return float((guesses == digits.test_labels).float().mean())


def _travelled_over(model: nn.Module) -> str:
    if not isinstance(model, DistributedDataParallel):
        return dist.get_backend()
    transport = model.stats().transport
    return "shared memory" if transport == "shm" else transport


# --- memory, and a rank that is killed -----------------------------------------------------------


@dataclass(frozen=True)
class DemoNote:
    """What a rank leaves behind in a folder; written before and after a rank is killed.

    Attributes:
        rank: Which one.
        peak_bytes: The most memory above the weights, for three steps; None where the kernel does
            not tell.
        at_s: When it raised, on the clock that all processes share; None as long as it has not.
        text: What it raised.
    """

    rank: int
    peak_bytes: int | None = None
    at_s: float | None = None
    text: str = ""


def lose_a_rank(wrapper: str, folder: Path) -> None:
    """Train for a few steps, note the memory; then the last rank is killed in a backward.

    Processes of its own: malloc returns every block at once here, so that resident memory is what
    lives, and steps are slow. With one rank nobody is killed.
    """
    rank, victim = dist.get_rank(), dist.get_world_size() - 1
    malloc.return_memory(RETURNED_ABOVE_BYTES)
    steps = _Steps(wrapper, nn.Linear(64, 10))  # imports and thread pools are not counted
    steps.run(3)
    network = _network()
    gc.collect()
    base_bytes = _memory_bytes("VmRSS", rank)
    steps = _Steps(wrapper, network)
    steps.run(3)
    peak_bytes = _memory_bytes("VmHWM", rank)
    if base_bytes is not None and peak_bytes is not None:
        peak_bytes -= base_bytes
    _write(folder, DemoNote(rank, peak_bytes))
    if victim == 0:
        return
    try:
        steps.run(1, die=(lambda: _die(folder)) if rank == victim else None)
        steps.run(1)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        _write(folder, DemoNote(rank, peak_bytes, time.monotonic(), text))


class _Steps:
    """The steps of a training whose data does not matter."""

    def __init__(self, wrapper: str, module: nn.Module) -> None:
        self._model = WRAPPERS[wrapper](module)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)

    def run(self, count: int, die: Callable[[], None] | None = None) -> None:
        """Train; ``die`` is called in the middle of the backward."""
        for _ in range(count):
            loss = self._model(torch.ones(8, 64)).square().mean()
            if die is not None:
                loss.register_hook(lambda gradient: die())
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()


def _memory_bytes(name: str, rank: int) -> int | None:
    if sys.platform != "linux":
        return None
    found = resident_bytes(name, rank)
    reset_high_water_mark()
    return found


def _die(folder: Path) -> None:
    (folder / KILLED).write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def _write(folder: Path, note: DemoNote) -> None:
    part = folder / f"{note.rank}.part"
    part.write_text(json.dumps(asdict(note)))
    part.rename(folder / f"{note.rank}.json")


def read_notes(folder: Path) -> list[DemoNote]:
    """Return what the ranks noted, in their order; ``at_s`` counts from the kill."""
    notes = [DemoNote(**json.loads(file.read_text())) for file in folder.glob("*.json")]
    killed = folder / KILLED
    killed_s = float(killed.read_text()) if killed.exists() else 0.0
    return [
        note if note.at_s is None else replace(note, at_s=note.at_s - killed_s)
        for note in sorted(notes, key=lambda note: note.rank)
    ]
