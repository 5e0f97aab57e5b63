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
    from paceline import hooks, nn, ps, testing
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

    __version__: str

__all__ = [
    "BucketStats",
    "DDPStats",
    "DataParallel",
    "DistributedDataParallel",
    "PacelineError",
    "__version__",
    "data_parallel",
    "errors",
    "gather",
    "hooks",
    "nn",
    "parallel_apply",
    "ps",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "testing",
]

# torch takes seconds to import, and `paceline --help` does not need it.
_IMPORTED_ON_USE = {
    "DataParallel": "paceline.dp",
    "DistributedDataParallel": "paceline.ddp",
    "data_parallel": "paceline.dp",
    "gather": "paceline.dp",
    "parallel_apply": "paceline.dp",
    "replicate": "paceline.dp",
    "scatter": "paceline.dp",
    "scatter_kwargs": "paceline.dp",
}
_MODULES = {"hooks", "nn", "ps", "testing"}

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
