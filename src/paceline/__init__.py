"""Data-parallel training for PyTorch that people choose over what ships with torch.

Start with ``from paceline import DistributedDataParallel as DDP``.
"""

from paceline.ddp import DistributedDataParallel
from paceline.errors import (
    AutogradGradError,
    CollectiveError,
    ConfigurationError,
    DesynchronizedError,
    GradientMismatchError,
    GraphChangedError,
    GroupNotReadyError,
    HookAlreadyRegisteredError,
    HookNotCallableError,
    HookResultError,
    HookSignatureError,
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
    UntrainableModuleError,
    UnusedParametersError,
)
from paceline.observe import BucketStats, DDPStats

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
    "HookNotCallableError",
    "HookResultError",
    "HookSignatureError",
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
    "UntrainableModuleError",
    "UnusedParametersError",
]
