"""The whole exception tree. Every module raises from here; this module imports nothing::

  PacelineError
  ├── ConfigurationError (ValueError)        an argument or a combination of arguments is wrong
  │   ├── ArgumentTypeError (TypeError)      an argument is of a wrong type
  │   ├── UntrainableModuleError (RuntimeError)  nothing to train, or not yet initialised
  │   ├── UnknownHookError (AttributeError)  there is no communication hook of that name
  │   ├── MeshError (RuntimeError)           a device mesh that does not fit
  │   ├── SharedMemoryError (RuntimeError)   transport="shm" was asked for and cannot be had
  │   ├── CollectiveInputError (RuntimeError)  tensors that do not fit the collective they are for
  │   ├── PlacementError (RuntimeError)      a module or a replica is not where it has to be
  │   ├── ForeignWrapperError (RuntimeError) torch's own wrapper averages the same parameters
  │   └── AlreadyTrainingError (RuntimeError)  a setting that must come before training
  ├── GroupNotReadyError (ValueError)        there is no process group to reduce over
  ├── NotPicklableError (RuntimeError)       this wrapper cannot be pickled, and why
  ├── ModelMismatchError (RuntimeError)      ranks hold different models or buckets
  ├── ParametersChangedError (RuntimeError)  the module gained parameters after it was wrapped
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
  │   ├── PeerFailedError                    another rank's backward raised before it was done
  │   ├── DesynchronizedError                ranks are in different steps, or weigh differently
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
  └── NormInputError (ValueError)            an input that cannot be normalised over its batch

The text of each says what was expected, what was found (names, ranks, shapes) and what to do.
Rank, parameters and operation are attributes too, for programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class PacelineError(Exception):
    """Base of everything Paceline raises on purpose.

    Args:
        message: What was expected, what was found, what to do.
        rank: The rank the trouble comes from, where one is known.
        parameters: Names of the parameters concerned.
        operation: What was being done, for example ``"all_reduce of bucket 2"``.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        parameters: Sequence[str] = (),
        operation: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.parameters = tuple(parameters)
        self.operation = operation


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


class StepError(PacelineError, RuntimeError):
    """One step failed. Every rank raises, and the next step may be run."""


class UnusedParametersError(StepError):
    """A backward pass ended and some parameters had received no gradient."""


class SharedParametersError(StepError):
    """Two wrappers that share parameters treat their gradients differently in one backward."""


class GraphChangedError(StepError):
    """``static_graph`` was promised, and the graph is not the one of the first step."""


class ReadyTwiceError(StepError):
    """A parameter's gradient arrived a second time in one backward pass."""


class NonFiniteGradientError(StepError, ArithmeticError):
    """A gradient holds NaN or infinity."""


class GradientMismatchError(StepError):
    """A gradient does not have the dtype or the layout that its bucket was planned for."""


class HookResultError(StepError, TypeError):
    """A communication hook raised, or returned something that is not its bucket's tensor."""


class HookInputError(StepError, TypeError):
    """A communication hook was given gradients that it cannot work on."""


class HookOrderLostError(StepError):
    """An earlier bucket of this hook failed, and ranks are in different collectives since."""


class AutogradGradError(StepError):
    """``torch.autograd.grad`` took gradients which then cannot be reduced."""


class PeerFailedError(StepError):
    """Another rank's backward pass raised before its gradients were complete."""


class DesynchronizedError(StepError):
    """Ranks reduced with each other while they were in different steps."""


class CollectiveError(StepError):
    """The process group could not do what was asked of it."""

    def inside(self, operation: str) -> CollectiveError:
        """Say which operation of the step it was, and return the same error."""
        self.operation = operation
        self.args = (f"{operation}: {self.args[0]}",)
        return self


class PeerLostError(CollectiveError, ConnectionError):
    """A rank died, or left the group, while others needed it. The group is over.

    Attributes:
        rank: The rank that is gone.
        host: Where it ran.
        pid: Its process.
    """

    def __init__(self, message: str, *, host: str = "", pid: int = 0, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.host = host
        self.pid = pid


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A rank did not come to a collective before the deadline. The group is over.

    Attributes:
        rank: The first rank that is missing.
        missing: All of them.
    """

    def __init__(self, message: str, *, missing: Sequence[int] = (), **facts: Any) -> None:
        super().__init__(message, **facts)
        self.missing = tuple(missing)


class CollectiveMismatchError(CollectiveError):
    """Ranks brought different sizes, dtypes, operations or collectives, and the group goes on.

    Or they wait for each other in different collectives: then the group is over.
    """


class GroupAbortedError(CollectiveError):
    """Somebody ended the group: ``abort()``, or Ctrl-C inside of a collective."""


class GroupClosedError(CollectiveError):
    """The group was used after it was destroyed, or in a forked child of its owner."""


class HookSignatureError(PacelineError, ValueError):
    """A communication hook does not take ``(state, bucket)`` or says it returns something else."""


class HookNotCallableError(PacelineError, TypeError):
    """A communication hook is not a function."""


class HookAlreadyRegisteredError(PacelineError, RuntimeError):
    """The wrapper has a communication hook already."""


class ReplicaCountError(PacelineError, AssertionError):
    """There is not exactly one input (and one set of kwargs, and one device) for each replica."""


class ScatterError(PacelineError, RuntimeError):
    """The inputs cannot be cut into one piece per replica."""


class ScatterDimError(ScatterError, IndexError):
    """A tensor among the inputs does not have the dimension that is cut along."""


class GatherError(PacelineError, RuntimeError):
    """The outputs of the replicas cannot be put together."""


class GatherKeysError(GatherError, ValueError, KeyError):
    """The replicas returned containers of different length, or dicts with different keys."""

    __str__ = Exception.__str__  # KeyError shows the repr of its text


class GatherTypeError(GatherError, TypeError):
    """The replicas returned something that is neither tensor nor container, and differs."""


class SharedWriteError(PacelineError, RuntimeError):
    """A forward wrote to a parameter whose memory several replicas share."""


class NormInputError(PacelineError, ValueError, RuntimeError):
    """A batch normalisation got an input whose statistics do not exist."""


class ServerError(PacelineError, RuntimeError):
    """A parameter server did not do what was asked.

    Attributes:
        server: Its index among the servers of this connection.
        address: Where it is, or was.
        table: The table concerned, where there is one.
    """

    def __init__(
        self,
        message: str,
        *,
        server: int = -1,
        address: str = "",
        table: str | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message, **facts)
        self.server = server
        self.address = address
        self.table = table


class ServerLostError(ServerError, ConnectionError):
    """A server did not answer before the deadline, or came back without its state."""


class ServerRefusedError(ServerError):
    """A server refused a message.

    Attributes:
        code: Which kind of refusal, as in ``docs/decisions/0007-parameter-servers.md``.
        id: The id concerned, where there is one.
    """

    def __init__(
        self, message: str, *, code: str = "", id: int | None = None, **facts: Any
    ) -> None:
        super().__init__(message, **facts)
        self.code = code
        self.id = id


class PushRefusedError(ServerRefusedError):
    """A server refused earlier pushes, of which nobody waits for the answer.

    Attributes:
        pushes: How many, of all servers.
        rows: How many rows were in them.
    """

    def __init__(self, message: str, *, pushes: int = 0, rows: int = 0, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.pushes = pushes
        self.rows = rows


class ServerKeyError(ServerError, PermissionError):
    """A server does not accept this trainer's key, or is not the one that it claims to be."""


class ServersClosedError(ServerError):
    """A connection to servers was used after it was closed, or in a forked child."""


class IdRangeError(PacelineError, IndexError, RuntimeError):
    """An id is outside of its table.

    Attributes:
        table: The table's name.
        id: The id.
    """

    def __init__(self, message: str, *, table: str = "", id: int = -1, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.table = table
        self.id = id


class BagsError(PacelineError, ValueError, NotImplementedError):
    """Ids, offsets or weights that are no bags: wrong shape, dtype or order."""


class ServerStartError(PacelineError, RuntimeError):
    """A parameter server cannot start: its address or directory is taken, or a key is missing."""


class ServerStateError(ServerStartError):
    """A parameter server's journal or snapshot is damaged, or of another version."""
