"""Trainings over shards whose every bit is compared: what a rank runs in the tests of this room."""

from __future__ import annotations

import contextlib
import hashlib
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline import DistributedDataParallel as DDP
from tests.shards.models import (
    Gated,
    Oddities,
    Small,
    Synced,
    SyncedFirst,
    SyncedWords,
    Transformer,
    Words,
    mlp,
)

SHARDS = 8
MICRO = 3


Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2)]


def sparse_adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    assert isinstance(model, Words)
    return [
        torch.optim.SparseAdam(model.table.parameters(), lr=1e-2),
        torch.optim.SGD(model.out.parameters(), lr=0.05),
    ]


def sparse_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW refuses sparse gradients."""
    assert isinstance(model, Words)
    return [
        torch.optim.SparseAdam(model.table.parameters(), lr=1e-2),
        torch.optim.AdamW(model.out.parameters(), lr=1e-2),
    ]


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        make: The model.
        optimizers: Of it.
        ddp: Arguments of the wrapper.
        accumulate: Rounds for each step.
        decays: The learning rate changes.
        is_weighted: Shards have weights, one of them zero.
        clips: With ``paceline.clip_grad_norm_``.
        breaks: In this step a sample is NaN.
        shards: How many.
        hook: Registered on the wrapper.
        in_turns: Layers need all shards at once.
        scale: Of losses.
        dtype: Of parameters.
        autocasts: Forwards run in bfloat16.
        clamps: Each shard's gradients, with a hook.
        micro: Samples of a shard.
    """

    make: Callable[[], nn.Module]
    optimizers: Optimizers = sgd
    ddp: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    decays: bool = False
    is_weighted: bool = False
    clips: bool = False
    breaks: int = -1
    shards: int = SHARDS
    hook: str = ""
    in_turns: bool = False
    scale: float = 1.0
    dtype: torch.dtype = torch.float32
    autocasts: bool = False
    clamps: bool = False
    micro: int = MICRO

    def model(self) -> nn.Module:
        """The same everywhere."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made = self.make()
        return made if self.dtype == torch.float32 else made.to(self.dtype)

    def wrap(self, model: nn.Module, transport: str = "auto") -> Any:
        """Wrap a model; register what the case has."""
        shards = paceline.Shards(self.shards, checksum_gradients_every=2)  # for test_verify.py
        ddp = DDP(model, shards=shards, transport=transport, **self.ddp)
        if self.hook:
            ddp.register_comm_hook(None, getattr(paceline.hooks, self.hook))
        for parameter in model.parameters() if self.clamps else ():
            parameter.register_post_accumulate_grad_hook(_clamp)
        return ddp


def _clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


CASES = {
    "mlp": Case(mlp, sgd, {"bucket_cap_mb": 0.0005}, accumulate=2),
    "cnn": Case(Small, adamw, decays=True),
    "transformer": Case(Transformer, adamw, {"bucket_cap_mb": 0.001}, clips=True),
    "embedding": Case(Words, sparse_adam, accumulate=2),
    "subnormal": Case(mlp, sgd, {"bucket_cap_mb": 0.0005}, scale=1e-37),  # 1 / shards is not exact
    "three shards": Case(Words, sparse_adam, shards=3, accumulate=2),
    "four shards": Case(mlp, sgd, shards=4, accumulate=2, scale=1e-37),
    "unused": Case(Gated, sgd, {"find_unused_parameters": True}, decays=True),
    "weighted": Case(mlp, adamw, is_weighted=True),
    "weighted embedding": Case(Words, sgd, is_weighted=True),
    "skipped": Case(mlp, sgd, {"nonfinite": "skip"}, breaks=2),
    "copies": Case(mlp, sgd, {"gradient_as_bucket_view": False}, accumulate=2),
    "torch's views": Case(mlp, sgd, {"gradient_as_bucket_view": True}, accumulate=2),
    "no power of two": Case(Small, adamw, shards=11),
    "bf16": Case(mlp, sgd, {"bucket_cap_mb": 0.0005}, hook="bf16_compress_hook"),
    "synced": Case(
        Synced, adamw, {"bucket_cap_mb": 0.0005}, accumulate=2, decays=True, in_turns=True
    ),
    "synced words": Case(
        SyncedWords, sgd, {"find_unused_parameters": True}, shards=7, in_turns=True
    ),
    "synced first": Case(SyncedFirst, adamw, {"find_unused_parameters": True}, in_turns=True),
    "synced bf16": Case(Synced, sgd, clips=True, hook="bf16_compress_hook", in_turns=True),
    "fp16": Case(mlp, sgd, is_weighted=True, hook="fp16_compress_hook"),
    # A factor of 1 / 11 or 1 / 3 must be rounded alike wherever it is applied.
    "bf16 parameters": Case(
        Transformer, adamw, {"bucket_cap_mb": 0.0005}, shards=11, dtype=torch.bfloat16
    ),
    "bf16 parameters of three shards": Case(mlp, sgd, shards=3, dtype=torch.bfloat16, accumulate=2),
    "weighted bf16 parameters": Case(
        mlp, sgd, shards=11, dtype=torch.bfloat16, is_weighted=True, clips=True
    ),
    "fp16 parameters": Case(
        mlp, sgd, {"bucket_cap_mb": 0.0005}, shards=11, dtype=torch.float16, scale=8.0
    ),
    "float64 parameters": Case(Small, adamw, shards=11, dtype=torch.float64, clips=True),
    "autocast": Case(mlp, adamw, shards=11, autocasts=True, decays=True),
    "oddities": Case(Oddities, adamw, {"bucket_cap_mb": 0.0005}, shards=11),
    "clamped": Case(mlp, sgd, {"bucket_cap_mb": 0.0005}, clamps=True),
}


_MATRIX_MODELS: dict[str, tuple[Callable[[], nn.Module], Optimizers, Optimizers]] = {
    "mlp": (mlp, sgd, adamw),
    "cnn": (Small, sgd, adamw),
    "transformer": (Transformer, sgd, adamw),
    "embedding": (Words, sgd, sparse_adamw),
}
_SMALL_BUCKETS = {"bucket_cap_mb": 0.0005}
MATRIX = {
    f"{name}, {kind}": case
    for name, (make, plain, adaptive) in _MATRIX_MODELS.items()
    for kind, case in {
        "SGD": Case(make, plain),
        "AdamW": Case(make, adaptive, _SMALL_BUCKETS, clips=name != "embedding"),
        "accumulation": Case(make, plain, _SMALL_BUCKETS, accumulate=2),
        "schedule": Case(make, adaptive, decays=True),
    }.items()
}
"""Every kind of model with every kind of training."""


def both(model: nn.Module) -> list[torch.optim.Optimizer]:
    """SGD for the first half of the parameters, an embedding among them; AdamW for the rest."""
    parameters = list(model.parameters())
    middle = len(parameters) // 2
    return [
        torch.optim.SGD(parameters[:middle], lr=0.05, momentum=0.9),
        torch.optim.AdamW(parameters[middle:], lr=1e-2),
    ]


LONG = {
    f"long {name}": Case(make, both, _SMALL_BUCKETS, accumulate=2, decays=True)
    for name, (make, _, _) in _MATRIX_MODELS.items()
}
"""Every kind of model, each with all kinds of training at once."""


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """One that begins again and again: a rate that falls for ever would end the training."""
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7)


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples with augmentation that draws from all three sources of randomness."""

    def __init__(self, size: int, broken: int = -1) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(size, 16, generator=generator)
        self.y = torch.randn(size, 5, generator=generator)
        if broken >= 0:
            self.x[broken] = torch.nan

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.01 * (random.random() + float(np.random.rand()))
        return self.x[index] + noise * torch.randn(16), self.y[index]


def digest(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> str:
    """SHA-256 of parameters, buffers and optimizer states."""
    sha = hashlib.sha256()
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        for state in optimizer.state_dict()["state"].values():
            tensors += [state[name] for name in sorted(state)]
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            tensor = tensor.to_dense() if tensor.is_sparse else tensor
            sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            sha.update(repr(tensor).encode())
    return sha.hexdigest()


def train(case: Case, steps: int, *, transport: str = "auto", **loading: Any) -> str:
    """Train on this rank; return the digest of what it ends with."""
    warnings.simplefilter("ignore", FutureWarning)
    torch.manual_seed(dist.get_rank())  # a rank's own stream must not matter
    model = case.model()
    ddp = case.wrap(model, transport)
    optimizers = case.optimizers(model)
    schedules = [make_schedule(each) for each in optimizers]
    data = Data(case.shards * case.micro * 4, broken=5 if case.breaks >= 0 else -1)
    loader = paceline.ShardLoader(data, ddp, case.micro, seed=4, **loading)
    done = epoch = 0
    while done < steps * case.accumulate:
        loader.set_epoch(epoch)
        for batch in loader:
            run_round(case, ddp, batch)
            done += 1
            if done % case.accumulate:
                continue
            if case.clips:
                paceline.clip_grad_norm_(model.parameters(), 0.5)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                if case.decays:
                    schedule.step()
            if done >= steps * case.accumulate:
                break
        epoch += 1
    assert ddp.shard_round == done
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    if case.breaks >= 0:
        assert ddp.skipped_steps > 0
    return digest(model, optimizers)


def run_round(case: Case, ddp: Any, batch: Any) -> None:
    if case.in_turns:
        ddp.run_shards(batch, lambda micro: run_shard(case, ddp, 0, *micro))
        return
    for shard, (x, y) in zip(ddp.shard_shares.owned, ddp.shards(batch), strict=True):
        run_shard(case, ddp, shard, x, y)


def run_shard(case: Case, ddp: Any, shard: int, x: Tensor, y: Tensor) -> None:
    with ddp.weighted(shard % 3) if case.is_weighted else contextlib.nullcontext():
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocasts):
            loss = F.mse_loss(ddp(x.to(case.dtype)), y.to(case.dtype))
        (loss * case.scale).backward()


def train_all(names: list[str], steps: int, transports: list[str]) -> dict[str, str]:
    """Train all cases, one after the other, over all transports."""
    cases = CASES | MATRIX | LONG
    return {
        f"{name} over {transport}": train(cases[name], steps, transport=transport)
        for name in names
        for transport in transports
    }


def train_with_workers(name: str, steps: int) -> list[str]:
    """Train a case with workers that load, of several kinds."""
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more than there are cores
    kinds: list[dict[str, Any]] = [
        {"num_workers": 1},
        {"num_workers": 3, "prefetch_factor": 4, "persistent_workers": True},
    ]
    return [train(CASES[name], steps, **loading) for loading in kinds]
