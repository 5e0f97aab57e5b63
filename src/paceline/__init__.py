"""Data-parallel training for PyTorch that people choose over what ships with torch.

Start with ``from paceline import DistributedDataParallel as DDP``.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from paceline.autoload import register_backend
from paceline.errors import (
    AlreadyTrainingError,
    ArgumentTypeError,
    AutogradGradError,
    BagsError,
    CollectiveError,
    CollectiveInputError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigurationError,
    DesynchronizedError,
    ForeignWrapperError,
    GatherError,
    GatherKeysError,
    GatherTypeError,
    GradientMismatchError,
    GraphChangedError,
    GroupAbortedError,
    GroupClosedError,
    GroupNotReadyError,
    HookAlreadyRegisteredError,
    HookInputError,
    HookNotCallableError,
    HookOrderLostError,
    HookResultError,
    HookSignatureError,
    IdRangeError,
    MeshError,
    ModelMismatchError,
    NonFiniteGradientError,
    NormInputError,
    NotPicklableError,
    PacelineError,
    ParametersChangedError,
    PeerFailedError,
    PeerLostError,
    PlacementError,
    PushRefusedError,
    ReadyTwiceError,
    ReplicaCountError,
    ScatterDimError,
    ScatterError,
    ServerError,
    ServerKeyError,
    ServerLostError,
    ServerRefusedError,
    ServersClosedError,
    ServerStartError,
    ServerStateError,
    SharedMemoryError,
    SharedParametersError,
    SharedWriteError,
    StepError,
    UnknownHookError,
    UntrainableModuleError,
    UnusedParametersError,
)
from paceline.observe import BucketStats, DDPStats

if TYPE_CHECKING:
    from paceline import nn
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

__all__ = [
    "AlreadyTrainingError",
    "ArgumentTypeError",
    "AutogradGradError",
    "BagsError",
    "BucketStats",
    "CollectiveError",
    "CollectiveInputError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ConfigurationError",
    "DDPStats",
    "DataParallel",
    "DesynchronizedError",
    "DistributedDataParallel",
    "ForeignWrapperError",
    "GatherError",
    "GatherKeysError",
    "GatherTypeError",
    "GradientMismatchError",
    "GraphChangedError",
    "GroupAbortedError",
    "GroupClosedError",
    "GroupNotReadyError",
    "HookAlreadyRegisteredError",
    "HookInputError",
    "HookNotCallableError",
    "HookOrderLostError",
    "HookResultError",
    "HookSignatureError",
    "IdRangeError",
    "MeshError",
    "ModelMismatchError",
    "NonFiniteGradientError",
    "NormInputError",
    "NotPicklableError",
    "PacelineError",
    "ParametersChangedError",
    "PeerFailedError",
    "PeerLostError",
    "PlacementError",
    "PushRefusedError",
    "ReadyTwiceError",
    "ReplicaCountError",
    "ScatterDimError",
    "ScatterError",
    "ServerError",
    "ServerKeyError",
    "ServerLostError",
    "ServerRefusedError",
    "ServerStartError",
    "ServerStateError",
    "ServersClosedError",
    "SharedMemoryError",
    "SharedParametersError",
    "SharedWriteError",
    "StepError",
    "UnknownHookError",
    "UntrainableModuleError",
    "UnusedParametersError",
    "data_parallel",
    "gather",
    "nn",
    "parallel_apply",
    "replicate",
    "scatter",
    "scatter_kwargs",
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

if "torch.distributed" in sys.modules:
    register_backend()  # else torch does it, when it is imported


def __getattr__(name: str) -> object:
    if name == "nn":
        return importlib.import_module("paceline.nn")
    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(importlib.import_module(_IMPORTED_ON_USE[name]), name)
    globals()[name] = value
    return value
