"""The whole exception tree. Every module raises from here; nothing else is imported::

  PacelineError
  ├── ConfigurationError (ValueError)        an argument or a combination of arguments is wrong
  │   ├── ArgumentTypeError (TypeError)      an argument is of a wrong type
  │   ├── UntrainableModuleError (RuntimeError)  nothing to train, or not yet initialised
  │   ├── UnknownHookError (AttributeError)  there is no communication hook of that name
  │   ├── MeshError (RuntimeError)           a device mesh that does not fit
  │   ├── SharedMemoryError (RuntimeError)   transport="shm" was asked for and cannot be had
  │   ├── CollectiveInputError (RuntimeError)  tensors that do not fit the collective they are for
  │   ├── TableShapeError (AssertionError)   an embedding table's rows or padding_idx cannot be
  │   ├── PlacementError (RuntimeError)      a module or a replica is not where it has to be
  │   ├── ForeignWrapperError (RuntimeError) torch's own wrapper averages the same parameters
  │   └── AlreadyTrainingError (RuntimeError)  a setting that must come before training
  ├── GroupNotReadyError (ValueError)        there is no process group to reduce over
  ├── NotPicklableError (RuntimeError)       this wrapper cannot be pickled, and why
  ├── ModelMismatchError (RuntimeError)      ranks hold different models or buckets
  ├── ParametersChangedError (RuntimeError)  the module gained parameters after it was wrapped
  ├── FinalizationError (RuntimeError)       finalize_backward() is due, or not, or not possible
  ├── StepError (RuntimeError)               one step failed; the wrapper stays usable
  │   ├── UnusedParametersError              a backward ended and gradients were missing
  │   ├── SharedParametersError              wrappers that share parameters differ in one backward
  │   ├── GraphChangedError                  static_graph was promised and not kept
  │   ├── ReadyTwiceError                    a gradient arrived twice in one backward
  │   ├── NonFiniteGradientError (ArithmeticError)  NaN or infinity, with nonfinite="raise"
  │   ├── GradientMismatchError              a gradient's dtype or layout is not the bucket's
  │   ├── HookResultError (TypeError)        a communication hook failed
  │   ├── HookInputError (TypeError)         a hook cannot work on gradients of this kind
  │   ├── HookOrderLostError                 an earlier bucket of this hook failed
  │   ├── AutogradGradError                  torch.autograd.grad took gradients away
  │   ├── BackwardOutsideNoSyncError         forward under no_sync, backward outside, then an update
  │   ├── PeerFailedError                    another rank's backward raised before it was done
  │   ├── DesynchronizedError                ranks are in different steps, or weigh differently
  │   │   └── ReplicasDifferError            check_every has found parameters that differ
  │   └── CollectiveError                    the group could not do what was asked of it
  │       ├── PeerLostError (ConnectionError)  a rank died, or left the group
  │       ├── CollectiveTimeoutError (TimeoutError)  a rank did not come before the deadline
  │       ├── CollectiveMismatchError        ranks brought different things to one collective
  │       ├── GroupAbortedError              abort() was called, or a rank was interrupted
  │       └── GroupClosedError               the group was used after it was destroyed, or in a fork
  ├── HookSignatureError (ValueError)        a hook does not take (state, bucket)
  ├── HookNotCallableError (TypeError)       a hook is no function
  ├── HookAlreadyRegisteredError (RuntimeError)  a wrapper has one hook
  ├── ReplicaCountError (AssertionError)     not one input, kwargs and device for each replica
  ├── ScatterError (RuntimeError)            inputs cannot be cut into one piece per replica
  │   └── ScatterDimError (IndexError)       a tensor does not have the dimension to cut along
  ├── GatherError (RuntimeError)             outputs of replicas do not fit together
  │   ├── GatherKeysError (ValueError)       containers of different length or keys
  │   └── GatherTypeError (TypeError)        something that cannot be put together
  ├── SharedWriteError (RuntimeError)        replicas wrote to a parameter whose memory they share
  ├── ServerError (RuntimeError)             a parameter server did not do what was asked
  │   ├── ServerLostError (ConnectionError)  it did not answer in time, or came back without state
  │   ├── ServerRefusedError                 it refused a message, and says why
  │   │   └── PushRefusedError               it refused earlier pushes, which nobody waits for
  │   ├── ServerKeyError (PermissionError)   it does not accept this trainer's key
  │   └── ServersClosedError                 used after close(), or in a forked child
  ├── IdRangeError (IndexError)              an id that a table does not have
  ├── BagsError (ValueError)                 ids, offsets or weights that are no bags
  ├── ServerStartError (RuntimeError)        a parameter server cannot start, and why
  │   └── ServerStateError                   its files are damaged, or of another version
  ├── MembershipError (RuntimeError)         elastic training cannot go on, and why
  │   ├── CheckpointError                    a state cannot be saved, found or loaded
  │   └── StateTransferError                 a state cannot be sent to another rank, or does not fit
  ├── TorchNameError (ImportError)           this torch lacks a private name that a feature needs
  ├── RecordsError (ValueError)              a file of records is missing or damaged
  └── NormInputError (ValueError)            an input that cannot be normalised over its batch

The text of each says what was expected, what was found (names, ranks, shapes) and what to do.
Rank, parameters and operation are attributes too, for programs.
"""

from __future__ import annotations

from paceline.errors.base import (
    PacelineError,
)
from paceline.errors.jobs import (
    CheckpointError,
    MembershipError,
    RecordsError,
    StateTransferError,
)
from paceline.errors.replicas import (
    GatherError,
    GatherKeysError,
    GatherTypeError,
    ReplicaCountError,
    ScatterDimError,
    ScatterError,
    SharedWriteError,
)
from paceline.errors.servers import (
    BagsError,
    IdRangeError,
    PushRefusedError,
    ServerError,
    ServerKeyError,
    ServerLostError,
    ServerRefusedError,
    ServersClosedError,
    ServerStartError,
    ServerStateError,
)
from paceline.errors.setup import (
    AlreadyTrainingError,
    ArgumentTypeError,
    CollectiveInputError,
    ConfigurationError,
    FinalizationError,
    ForeignWrapperError,
    GroupNotReadyError,
    HookAlreadyRegisteredError,
    HookNotCallableError,
    HookSignatureError,
    MeshError,
    ModelMismatchError,
    NotPicklableError,
    ParametersChangedError,
    PlacementError,
    SharedMemoryError,
    TableShapeError,
    TorchNameError,
    UnknownHookError,
    UntrainableModuleError,
)
from paceline.errors.steps import (
    AutogradGradError,
    BackwardOutsideNoSyncError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DesynchronizedError,
    GradientMismatchError,
    GraphChangedError,
    GroupAbortedError,
    GroupClosedError,
    HookInputError,
    HookOrderLostError,
    HookResultError,
    NonFiniteGradientError,
    NormInputError,
    PeerFailedError,
    PeerLostError,
    ReadyTwiceError,
    ReplicasDifferError,
    SharedParametersError,
    StepError,
    UnusedParametersError,
)

__all__ = [
    "AlreadyTrainingError",
    "ArgumentTypeError",
    "AutogradGradError",
    "BackwardOutsideNoSyncError",
    "BagsError",
    "CheckpointError",
    "CollectiveError",
    "CollectiveInputError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ConfigurationError",
    "DesynchronizedError",
    "FinalizationError",
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
    "MembershipError",
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
    "RecordsError",
    "ReplicaCountError",
    "ReplicasDifferError",
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
    "StateTransferError",
    "StepError",
    "TableShapeError",
    "TorchNameError",
    "UnknownHookError",
    "UntrainableModuleError",
    "UnusedParametersError",
]

# One place for users, whatever the file: in tracebacks, pickles and the docs.
for _name in __all__:
    globals()[_name].__module__ = __name__
