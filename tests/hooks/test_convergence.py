"""Training with each hook gets as far as training with a plain all-reduce, in as many steps.

``make test`` trains with one hook of each family, ``make test-all`` with every one.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import math
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline.testing import run_ranks

PLAIN = "plain"
EPOCHS = 20

# --- digits ------------------------------------------------------------------------------------

Setup = tuple[DDP, torch.optim.Optimizer]


def digits_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def sgd(model: nn.Module, lr: float = 0.05, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=1e-4)


def with_hook(name: str, **options: Any) -> Callable[[], Setup]:
    def setup() -> Setup:
        model = DDP(digits_net())
        if name != PLAIN:
            hooks.register(model, name, **options)
        return model, sgd(model)

    return setup


def deep_gradient_compression() -> Setup:
    """The same momentum as plain training and the same rate; but the hook does it."""
    model = DDP(digits_net())
    hooks.register(model, "topk", ratio=0.01, momentum=0.9, warmup_steps=120)
    return model, sgd(model, momentum=0.0)


def by_function(hook: Any, state: Any = None) -> Callable[[], Setup]:
    def setup() -> Setup:
        model = DDP(digits_net())
        model.register_comm_hook(state() if state else None, hook)
        return model, sgd(model)

    return setup


def diloco() -> Setup:
    model = DDP(digits_net())
    hooks.register(model, "diloco")
    return model, hooks.DiLoCoOptimizer(sgd(model), period=10, outer_lr=0.7, outer_momentum=0.5)


def post_local_sgd() -> Setup:
    alone, _ = dist.new_subgroups(group_size=1)
    model = DDP(digits_net())
    state = hooks.PostLocalSGDState(None, alone, start_localSGD_iter=50)
    model.register_comm_hook(state, hooks.post_localSGD_hook)
    averager = hooks.PeriodicModelAverager(period=5, warmup_steps=50)
    return model, hooks.PostLocalSGDOptimizer(sgd(model), averager)


POWER = {"start_powerSGD_iter": 50, "matrix_approximation_rank": 2}


def power_state() -> hooks.PowerSGDState:
    return hooks.PowerSGDState(None, **POWER)


def top_k_state() -> hooks.TopKState:
    return hooks.TopKState(ratio=0.01, warmup_steps=60)


SETUPS: dict[str, Callable[[], Setup]] = {
    PLAIN: with_hook(PLAIN),
    "fp16": with_hook("fp16"),
    "bf16": with_hook("bf16"),
    "int8": with_hook("int8"),
    "int8, stochastic": with_hook("int8", stochastic=True),
    "int8 in bf16": by_function(
        hooks.bf16_compress_wrapper(hooks.quantized_hook), hooks.QuantizedState
    ),
    "e4m3": with_hook("e4m3"),
    "e5m2": with_hook("e5m2"),
    "sign": with_hook("sign", block=32, start_step=50),
    "powersgd": with_hook("powersgd", **POWER),
    "batched powersgd": with_hook("batched_powersgd", **POWER | {"matrix_approximation_rank": 4}),
    "powersgd in fp16": by_function(hooks.fp16_compress_wrapper(hooks.powerSGD_hook), power_state),
    "powersgd in bf16": by_function(hooks.bf16_compress_wrapper(hooks.powerSGD_hook), power_state),
    "topk in fp16": by_function(hooks.fp16_compress_wrapper(hooks.topk_hook), top_k_state),
    "topk in bf16": by_function(hooks.bf16_compress_wrapper(hooks.topk_hook), top_k_state),
    "topk 1 %": with_hook("topk", ratio=0.01, warmup_steps=60),
    "deep gradient compression": deep_gradient_compression,
    "quantise per tensor": by_function(hooks.quantization_pertensor_hook),
    "quantise per channel": by_function(hooks.quantization_perchannel_hook),
    "diloco": diloco,
    "post-local SGD": post_local_sgd,
}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1200], order[1200:]
    return images[train], labels[train], images[test], labels[test]


def accuracies(names: list[str], epochs: int) -> dict[str, float]:
    images, labels, test_images, test_labels = digits()
    world, rank = dist.get_world_size(), dist.get_rank()
    found = {}
    for name in names:
        model, optimizer = SETUPS[name]()
        schedule = torch.optim.lr_scheduler.LinearLR(
            optimizer.optim if hasattr(optimizer, "optim") else optimizer,
            1.0,
            0.05,
            total_iters=epochs * (1200 // 60),
        )
        for epoch in range(epochs):
            order = torch.randperm(1200, generator=torch.Generator().manual_seed(epoch))
            for batch in order.view(-1, 60):
                mine = batch[rank::world]
                optimizer.zero_grad()
                F.cross_entropy(model(images[mine]), labels[mine]).backward()
                optimizer.step()
                schedule.step()
        with torch.no_grad():
            right = (model.module(test_images).argmax(dim=1) == test_labels).float().mean()
        found[name] = right.item()
    return found


ONE_OF_EACH = ("int8", "powersgd", "topk 1 %", "diloco")
OTHERS = tuple(name for name in SETUPS if name not in (PLAIN, *ONE_OF_EACH))


@functools.cache
def trained(names: tuple[str, ...]) -> dict[str, float]:
    return run_ranks(2, accuracies, [PLAIN, *names], EPOCHS, timeout_s=280)[0]


def check_digits(name: str, found: dict[str, float]) -> None:
    assert found[PLAIN] > 0.93
    assert found[name] > found[PLAIN] - 0.01, f"{found[name]} against {found[PLAIN]}"


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_digits(name: str) -> None:
    check_digits(name, trained(ONE_OF_EACH))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_digits_with_others(name: str) -> None:
    check_digits(name, trained(OTHERS))


# --- a small language model --------------------------------------------------------------------


class LanguageModel(nn.Module):
    def __init__(self, width: int = 64, context: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.context = context
        self.tokens = nn.Embedding(128, width)
        self.places = nn.Parameter(0.02 * torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.body(self.tokens(x) + self.places, mask=mask, is_causal=True))


def text() -> Tensor:
    """Real text that every Python has."""
    source = inspect.getsource(argparse) + inspect.getsource(textwrap)
    return torch.tensor([min(ord(c), 127) for c in source])


def loss_of(model: nn.Module, data: Tensor, seed: int, rows: int = 8) -> Tensor:
    places = torch.randint(len(data) - 49, (rows,), generator=torch.Generator().manual_seed(seed))
    chunk = torch.stack([data[p : p + 49] for p in places])
    logits = model(chunk[:, :-1])
    return F.cross_entropy(logits.reshape(-1, 128), chunk[:, 1:].reshape(-1))


LANGUAGE = {
    PLAIN: {},
    "int8": {},
    "powersgd": {"matrix_approximation_rank": 4, "start_powerSGD_iter": 30},
    "topk": {"ratio": 0.01, "warmup_steps": 60, "warmup_ratio": 0.25},
}


def language_losses(steps: int) -> dict[str, float]:
    data = text()
    train, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    found = {}
    for name, options in LANGUAGE.items():
        model = DDP(LanguageModel(), bucket_cap_mb=0.1)
        if name != PLAIN:
            hooks.register(model, name, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, train, 1000 * step + dist.get_rank()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            found[name] = loss_of(model.module, held_out, 7, rows=256).item()
    return found


@pytest.fixture(scope="module")
def losses() -> dict[str, float]:
    return run_ranks(2, language_losses, 200, timeout_s=280)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LANGUAGE if name != PLAIN])
def test_language_model(name: str, losses: dict[str, float]) -> None:
    assert losses[PLAIN] < 0.75 * math.log(128)
    assert losses[name] < 1.02 * losses[PLAIN], f"{losses[name]} against {losses[PLAIN]}"
