"""Runs uses of a process group on gloo and on Paceline, and makes what they return comparable.

A use is a function of a folder for its files. All uses of a list share one set of ranks. What a
use raises counts as its result.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from paceline.testing import run_ranks

Use = Callable[[Path], Any]
Results = dict[str, list[dict[str, str]]]
BACKENDS = ("gloo", "paceline")
FAILED = "raised "


def plain(value: Any) -> Any:
    """The value with every tensor as dtype, shape and a digest of all its bits."""
    if isinstance(value, DTensor):
        return plain([value.to_local(), str(value.placements)])
    if isinstance(value, torch.Tensor):
        dense = value.detach().contiguous()
        bits = hashlib.sha256(dense.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        return f"{dense.dtype} {list(dense.shape)} {bits[:16]} first {dense.view(-1)[:2].tolist()}"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def run_uses(uses: list[Use], folder: Path) -> dict[str, str]:
    """In a rank: the result of each use, as text."""
    warnings.simplefilter("ignore")  # torch's own: of checkpoints, of pipelines
    found = {}
    for use in uses:
        torch.manual_seed(0)
        own = folder / use.__name__
        own.mkdir(exist_ok=True, parents=True)
        try:
            found[use.__name__] = str(plain(use(own)))
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            found[use.__name__] = f"{FAILED}{type(error).__name__}: {error}"
    return found


def on_both(uses: list[Use], ranks: int, folder: Path, timeout_s: float = 200.0) -> Results:
    """What each rank of gloo and of Paceline found."""
    return {
        backend: run_ranks(
            ranks, run_uses, uses, folder / backend, backend=backend, timeout_s=timeout_s
        )
        for backend in BACKENDS
    }
