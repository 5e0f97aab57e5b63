"""Data-parallel training for PyTorch that people choose over what ships with torch.

Start with ``from paceline import DistributedDataParallel as DDP``. Every exception class is in
:mod:`paceline.errors`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline import errors
from paceline.autoload import register_backend
from paceline.errors import PacelineError
from paceline.observe import BucketStats, DDPStats
from paceline.on_use import import_on_use

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
    from paceline.version import __version__

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
__getattr__ = import_on_use(
    __name__,
    {
        "DataParallel": "dp",
        "DistributedDataParallel": "ddp",
        "ShardLoader": "shards.loader",
        "Shards": "config",
        "__version__": "version",
        "clip_grad_norm_": "shards.clip",
        "data_parallel": "dp",
        "elastic": "",
        "gather": "dp",
        "hooks": "",
        "log": "observe",
        "nn": "",
        "observe": "",
        "parallel_apply": "dp",
        "patch_torch": "integrations.torch_patch",
        "ps": "",
        "replicate": "dp",
        "scatter": "dp",
        "scatter_kwargs": "dp",
        "testing": "",
        "unpatch_torch": "integrations.torch_patch",
    },
)

if "torch.distributed" in sys.modules:
    register_backend()  # else torch does it, when it is imported


def __dir__() -> list[str]:
    return sorted(__all__)
