"""Data-parallel training for PyTorch that people choose over what ships with torch.

Start with ``from paceline import DistributedDataParallel as DDP``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paceline.errors import (
    AutogradGradError,
    CollectiveError,
    ConfigurationError,
    DesynchronizedError,
    GradientMismatchError,
    GraphChangedError,
    GroupNotReadyError,
    HookAlreadyRegisteredError,
    HookInputError,
    HookNotCallableError,
    HookResultError,
    HookSignatureError,
    LaneBrokenError,
    MeshError,
    ModelMismatchError,
    NonFiniteGradientError,
    PacelineError,
    ParametersChangedError,
    PeerFailedError,
    PickleError,
    ReadyTwiceError,
    StepError,
    TooLateError,
    UnknownHookError,
    UntrainableModuleError,
    UnusedParametersError,
)
from paceline.observe import BucketStats, DDPStats

if TYPE_CHECKING:
    from paceline.ddp import DistributedDataParallel

__all__ = [
    "AutogradGradError",
    "BucketStats",
    "CollectiveError",
    "ConfigurationError",
    "DDPStats",
    "DesynchronizedError",
    "DistributedDataParallel",
    "GradientMismatchError",
    "GraphChangedError",
    "GroupNotReadyError",
    "HookAlreadyRegisteredError",
    "HookInputError",
    "HookNotCallableError",
    "HookResultError",
    "HookSignatureError",
    "LaneBrokenError",
    "MeshError",
    "ModelMismatchError",
    "NonFiniteGradientError",
    "PacelineError",
    "ParametersChangedError",
    "PeerFailedError",
    "PickleError",
    "ReadyTwiceError",
    "StepError",
    "TooLateError",
    "UnknownHookError",
    "UntrainableModuleError",
    "UnusedParametersError",
]

# torch takes seconds to import, and `paceline --help` does not need it.
_IMPORTED_ON_USE = {"DistributedDataParallel": "paceline.ddp"}


def __getattr__(name: str) -> object:
    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(importlib.import_module(_IMPORTED_ON_USE[name]), name)
    globals()[name] = value
    return value
