"""Compare a module on two or more CPU replicas with the same module, plain."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import paceline
from paceline.containers import tensors_in

CPUS = ["cpu", "cpu"]


def run(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, list[torch.Tensor | None]]:
    """Forward and backward; return the output, and gradients of parameters and inputs."""
    output = module(*args, **kwargs)
    loss = sum((t.abs() if t.is_complex() else t).float().pow(2).sum() for t in tensors_in(output))
    assert isinstance(loss, torch.Tensor)
    if loss.requires_grad:
        loss.backward()
    leaves = [*module.parameters(), *(t for t in tensors_in((args, kwargs)) if t.requires_grad)]
    gradients = [None if p.grad is None else p.grad.clone() for p in leaves]
    for leaf in leaves:
        leaf.grad = None
    return output, gradients


def assert_same_as_plain(
    module: nn.Module,
    *args: Any,
    devices: list[str] = CPUS,
    steps: int = 1,
    compare_buffers: bool = True,
    tolerance: dict[str, float] | None = None,
    plain: nn.Module | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Run both and compare outputs, gradients and state; return the module that ran in parallel."""
    plain = plain or copy.deepcopy(module)
    parallel = paceline.DataParallel(module, devices)
    if tolerance is None:
        # Gradients of replicas are added up in the parameter's dtype, half precision included.
        low = any(p.dtype in (torch.float16, torch.bfloat16) for p in module.parameters())
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if low else {}
    for _ in range(steps):
        expected = run(plain, *args, **kwargs)
        found = run(parallel, *args, **kwargs)
        torch.testing.assert_close(found, expected, **tolerance)
    if compare_buffers:
        torch.testing.assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))
    return module
