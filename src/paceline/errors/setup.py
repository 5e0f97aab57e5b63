"""A wrapper, a hook or a group cannot be set up as it was asked for."""

from __future__ import annotations

from paceline.errors.base import PacelineError


class ConfigurationError(PacelineError, ValueError):
    """An argument, or a combination of arguments, cannot work."""


class ArgumentTypeError(ConfigurationError, TypeError):
    """An argument is of a type that cannot work."""


class UntrainableModuleError(ConfigurationError, RuntimeError):
    """The module has nothing to train, or parameters that have no shape yet."""


class UnknownHookError(ConfigurationError, AttributeError):
    """There is no communication hook of that name or type."""


class MeshError(ConfigurationError, RuntimeError):
    """``device_mesh`` does not fit: it is not 1-D, or there is a group beside it."""


class SharedMemoryError(ConfigurationError, RuntimeError):
    """``transport="shm"`` was asked for, and the ranks of this group cannot share memory."""


class CollectiveInputError(ConfigurationError, RuntimeError):
    """A collective got tensors that do not fit: their number, sizes, dtypes, layout or device."""


class TableShapeError(ConfigurationError, AssertionError):
    """The rows of an embedding table are not a matrix, or padding_idx is not one of them."""


class PlacementError(ConfigurationError, RuntimeError):
    """A module is not on the device of its first replica, or a device does not exist here."""


class ForeignWrapperError(ConfigurationError, RuntimeError):
    """torch's own DistributedDataParallel averages parameters of this wrapper as well."""


class AlreadyTrainingError(ConfigurationError, RuntimeError):
    """A setting was changed that must be made before training begins."""


class GroupNotReadyError(PacelineError, ValueError):
    """There is no initialised process group to reduce over."""


class NotPicklableError(PacelineError, RuntimeError):
    """This wrapper cannot be pickled."""


class ModelMismatchError(PacelineError, RuntimeError):
    """Ranks hold different models, or would cut their gradients into different buckets."""


class ParametersChangedError(PacelineError, RuntimeError):
    """The module has trainable parameters that the wrapper has never seen."""


class FinalizationError(PacelineError, RuntimeError):
    """``finalize_backward()`` was called when it was not due, or not called when it was."""


class TorchNameError(PacelineError, ImportError):
    """The installed torch does not have a private name that a feature needs."""


class HookSignatureError(PacelineError, ValueError):
    """A communication hook does not take ``(state, bucket)`` or says it returns something else."""


class HookNotCallableError(PacelineError, TypeError):
    """A communication hook is not a function."""


class HookAlreadyRegisteredError(PacelineError, RuntimeError):
    """The wrapper has a communication hook already."""
