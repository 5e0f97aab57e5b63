"""The models that are measured: three of ours by name, or the user's by ``MODULE:FUNCTION``.

Read by benchmarks in the caller and in the ranks: a workload travels by its name. What the function
of a user returns is described in ``docs/bench.md`` and checked here.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.cli.bench.harness.models import MODELS
from paceline.errors import ConfigurationError


@dataclass(frozen=True)
class Workload:
    """A model, and a function that makes one batch for it.

    Attributes:
        module: The model, on CPU, not wrapped.
        batch: Makes a batch: a tensor (``model(batch)``), a tuple or list (``model(*batch)``), or
            a mapping (``model(**batch)``).
    """

    module: nn.Module
    batch: Callable[[], Any]


def _mlp() -> Workload:
    layers = [module for _ in range(6) for module in (nn.Linear(2048, 2048), nn.ReLU())]
    return Workload(nn.Sequential(*layers), lambda: torch.randn(16, 2048))


def _transformer() -> Workload:
    # No dropout: every contender then computes the same gradients, which is checked.
    layer = nn.TransformerEncoderLayer(d_model=256, nhead=8, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)
    return Workload(encoder, lambda: torch.randn(8, 32, 256))


def _small() -> Workload:
    layers = [nn.Linear(32, 32) for _ in range(300)]
    return Workload(nn.Sequential(*layers), lambda: torch.randn(16, 32))


_OURS: dict[str, Callable[[], Workload]] = dict(
    zip(MODELS, (_mlp, _transformer, _small), strict=True)
)


def make(name: str, *, seed: int = 0) -> Workload:
    """Make a workload: the same weights for the same seed.

    Raises:
        ConfigurationError: There is no such model, or it cannot be made.
    """
    torch.manual_seed(seed)
    return _OURS[name]() if name in _OURS else _users(name)


def batch(workload: Workload, *, seed: int) -> Any:
    """Make a batch: the same for the same seed."""
    torch.manual_seed(seed)
    return workload.batch()


def loss_of(model: nn.Module, inputs: Any) -> torch.Tensor:
    """Run the model on a batch and return its loss.

    A model that returns a scalar, or an object or mapping with ``loss``, has its own; of other
    tensors the mean square is taken.
    """
    if isinstance(inputs, Mapping):
        output = model(**inputs)
    elif isinstance(inputs, (tuple, list)):
        output = model(*inputs)
    else:
        output = model(inputs)
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    output = getattr(output, "loss", output)
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, torch.Tensor):
        raise TypeError(
            f"forward returned {type(output).__name__}; expected a tensor, or something with .loss"
        )
    return output if output.dim() == 0 else output.square().mean()


@dataclass(frozen=True)
class WorkloadProbe:
    """What one try of a workload showed.

    Attributes:
        problem: Why it cannot be measured; empty if it can.
        parameters: How many have a gradient.
        gradient_bytes: Of all of them.
        step_bytes: Weights and gradients: the least that a rank needs.
    """

    problem: str = ""
    parameters: int = 0
    gradient_bytes: int = 0
    step_bytes: int = 0


def probe(name: str) -> WorkloadProbe:
    """Make a workload and train it for a step, in this process; never raises because of it."""
    try:
        workload = make(name)
        inputs = batch(workload, seed=0)
        loss_of(workload.module, inputs).backward()
    except ConfigurationError as error:
        return WorkloadProbe(problem=str(error))
    except Exception as error:
        return WorkloadProbe(problem=f"--model {name}: a step of it failed: {_told(error)}")
    found = [p.grad for p in workload.module.parameters() if p.grad is not None]
    if not found:
        return WorkloadProbe(
            problem=f"--model {name}: no parameter got a gradient: nothing to reduce"
        )
    gradient_bytes = sum(grad.numel() * grad.element_size() for grad in found)
    weights = sum(p.numel() * p.element_size() for p in workload.module.parameters())
    return WorkloadProbe("", len(found), gradient_bytes, weights + gradient_bytes)


def _users(path: str) -> Workload:
    module_name, colon, function_name = path.partition(":")
    if not colon:
        known = ", ".join(MODELS)
        raise ConfigurationError(
            f"--model {path}: there is no such model; write {known}, or MODULE:FUNCTION"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        hint = "; it is looked for here and where Python looks" * isinstance(error, ImportError)
        raise ConfigurationError(f"--model {path}: {error}{hint}") from error
    except Exception as error:
        raise ConfigurationError(
            f"--model {path}: importing {module_name} failed: {_told(error)}"
        ) from error
    try:
        made = function()
    except Exception as error:
        raise ConfigurationError(f"--model {path}: calling it failed: {_told(error)}") from error
    return _checked(path, made)


def _checked(path: str, made: Any) -> Workload:
    model, batch_of = made if isinstance(made, tuple) and len(made) == 2 else (made, tuple)
    if isinstance(model, nn.Module) and callable(batch_of):
        return Workload(model, batch_of)
    if isinstance(model, nn.Module):
        what = f"a model and {type(batch_of).__name__}"
    else:
        what = type(made).__name__
    raise ConfigurationError(
        f"--model {path}: it returned {what}. Expected a model (called without arguments), or "
        "(model, batch) where batch is a function that makes the inputs of one step"
    )


def _told(error: Exception) -> str:
    """One line about an error, and where in the user's code it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f for f in frames if "/torch/" not in f.filename and f.filename != __file__]
    where = f" ({places[-1].filename}, line {places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {error}{where}"
