"""What each rank of ``paceline bench hooks`` does: the same training step with every hook in turn.

Called in the ranks by :mod:`paceline.cli.bench.hooks`. Bytes are what the process really wrote to
its sockets, as the kernel counts it; compression is the time of the whole process (all threads) in
a step, less that of a step with ``noop``, so the sending itself is in it.
"""

from __future__ import annotations

import copy
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel, hooks
from paceline.cli.bench.hooks import MODELS
from paceline.errors import ConfigurationError, UnknownHookError

NOOP = "noop"
HOOKS: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "fp16": {},
    "bf16": {},
    "int8": {},
    "e4m3": {},
    "sign": {},
    "powersgd": {"start_powerSGD_iter": 0, "compresses_first_steps": True},
    "topk": {"ratio": 0.01},
}
WARM_UP = 3
_IO = Path("/proc/self/io")


@dataclass(frozen=True)
class HookSample:
    """What a step costs with one hook, on rank 0.

    Attributes:
        name: The hook.
        sent_bytes: In one step.
        compute_ms: CPU time beyond that of a step without communication.
        local_ms: A step without communication.
    """

    name: str
    sent_bytes: int
    compute_ms: float
    local_ms: float

    def step_ms(self, bits_per_s: float) -> float:
        """Predict a step over such a link."""
        return self.local_ms + self.compute_ms + 8e3 * self.sent_bytes / bits_per_s


def check_names(names: Sequence[str]) -> list[str]:
    """Return which hooks to measure, plain all-reduce first.

    Raises:
        UnknownHookError: One of them is not known here.
    """
    unknown = [name for name in names if name not in HOOKS]
    if unknown:
        raise UnknownHookError(
            f"there is no hook {unknown[0]!r} to measure; there are: {', '.join(HOOKS)}"
        )
    return [name for name in HOOKS if name == "allreduce" or not names or name in names]


def measure_on_rank(model_name: str, names: Sequence[str], steps: int) -> list[HookSample]:
    """Measure every hook; called on every rank."""
    if not _IO.exists():
        raise ConfigurationError(
            f"bytes are counted by {_IO}, which only Linux has ({sys.platform})"
        )
    module, batch = build(model_name)
    local = _run(module, batch, NOOP, steps)
    samples = []
    for name in names:
        cost = _run(module, batch, name, steps)
        compute_ms = max(0.0, cost.cpu_ms - local.cpu_ms)
        samples.append(HookSample(name, cost.sent_bytes, compute_ms, local.wall_ms))
    return samples


@dataclass(frozen=True)
class _Cost:
    wall_ms: float
    cpu_ms: float
    sent_bytes: int


def _run(module: nn.Module, batch: torch.Tensor, name: str, steps: int) -> _Cost:
    model = DistributedDataParallel(copy.deepcopy(module))
    hooks.register(model, name, **HOOKS.get(name, {}))
    costs = [_step(model, batch) for _ in range(WARM_UP + steps)][WARM_UP:]
    return _Cost(
        statistics.median(cost.wall_ms for cost in costs),
        statistics.median(cost.cpu_ms for cost in costs),
        int(statistics.median(cost.sent_bytes for cost in costs)),
    )


def _step(model: nn.Module, batch: torch.Tensor) -> _Cost:
    dist.barrier()
    sent, cpu_s, wall_s = _written_bytes(), time.process_time(), time.perf_counter()
    model.zero_grad(set_to_none=True)
    model(batch).square().mean().backward()
    return _Cost(
        (time.perf_counter() - wall_s) * 1e3,
        (time.process_time() - cpu_s) * 1e3,
        _written_bytes() - sent,
    )


def _written_bytes() -> int:
    for line in _IO.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == "wchar":
            return int(value)
    raise ConfigurationError(f"{_IO} does not say how many bytes were written")


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Make a model and its batch by name, or by ``MODULE:FUNCTION``.

    Raises:
        ConfigurationError: There is no such model.
    """
    torch.manual_seed(0)
    if name == "mlp":
        layers = [part for _ in range(6) for part in (nn.Linear(2048, 2048), nn.ReLU())]
        return nn.Sequential(*layers), torch.randn(16, 2048)
    if name == "transformer":
        layer = nn.TransformerEncoderLayer(256, 8, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(8, 32, 256)
    if name == "small":
        return nn.Sequential(*[nn.Linear(32, 32) for _ in range(300)]), torch.randn(16, 32)
    try:
        module, batch = _find(name)()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"--model {name}: {error}") from error
    return module, batch


def check_model(name: str) -> None:
    """Look for a model without making it, before ranks are started.

    Raises:
        ConfigurationError: There is no such model.
    """
    if name not in MODELS:
        _find(name)


def _find(path: str) -> Callable[[], Any]:
    module_name, colon, function_name = path.partition(":")
    if not colon:
        raise ConfigurationError(
            f"--model {path}: there is no such model; write {', '.join(MODELS)}, or MODULE:FUNCTION"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"--model {path}: {error}") from error
    return function
