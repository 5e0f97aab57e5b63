"""Data-parallel training for PyTorch that people choose over what ships with torch.

Start with ``from paceline import DistributedDataParallel as DDP``. Every exception class is in
:mod:`paceline.errors`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from paceline import errors
from paceline.autoload import register_backend
from paceline.errors import PacelineError
from paceline.observe import BucketStats, DDPStats

if TYPE_CHECKING:
    from paceline import elastic, hooks, nn, observe, ps, testing
    from paceline.config import Shards
    from paceline.ddp import DistributedDataParallel
    from paceline.dp import (
        DataParallel,
        data_parallel,
        gather,
        parallel_apply,
        replicate,
        scatter,
        scatter_kwargs,
    )
    from paceline.integrations.torch_patch import patch_torch, unpatch_torch
    from paceline.observe import log
    from paceline.shards.clip import clip_grad_norm_
    from paceline.shards.loader import ShardLoader

    __version__: str

__all__ = [
    "BucketStats",
    "DDPStats",
    "DataParallel",
    "DistributedDataParallel",
    "PacelineError",
    "ShardLoader",
    "Shards",
    "__version__",
    "clip_grad_norm_",
    "data_parallel",
    "elastic",
    "errors",
    "gather",
    "hooks",
    "log",
    "nn",
    "observe",
    "parallel_apply",
    "patch_torch",
    "ps",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "testing",
    "unpatch_torch",
]

# torch takes seconds to import, and `paceline --help` does not need it.
_IMPORTED_ON_USE = {
    "DataParallel": "paceline.dp",
    "DistributedDataParallel": "paceline.ddp",
    "ShardLoader": "paceline.shards.loader",
    "Shards": "paceline.config",
    "clip_grad_norm_": "paceline.shards.clip",
    "data_parallel": "paceline.dp",
    "gather": "paceline.dp",
    "log": "paceline.observe",
    "parallel_apply": "paceline.dp",
    "patch_torch": "paceline.integrations.torch_patch",
    "replicate": "paceline.dp",
    "scatter": "paceline.dp",
    "scatter_kwargs": "paceline.dp",
    "unpatch_torch": "paceline.integrations.torch_patch",
}
_MODULES = {"elastic", "hooks", "nn", "observe", "ps", "testing"}

if "torch.distributed" in sys.modules:
    register_backend()  # else torch does it, when it is imported


def __getattr__(name: str) -> object:
    value: object
    if name in _MODULES:
        value = importlib.import_module(f"paceline.{name}")
    elif name == "__version__":
        value = _installed_version()
    elif name in _IMPORTED_ON_USE:
        value = getattr(importlib.import_module(_IMPORTED_ON_USE[name]), name)
    else:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    globals()[name] = value
    return value


def _installed_version() -> str:
    from importlib import metadata  # not cheap, and hardly ever needed

    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:  # a source tree that was not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
