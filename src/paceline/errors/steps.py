"""A step failed: gradients that are missing, ranks that are gone, collectives that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.errors.base import PacelineError


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


class BackwardOutsideNoSyncError(StepError):
    """An optimizer steps with gradients that only look averaged: their forward was local."""


class PeerFailedError(StepError):
    """Another rank's backward pass raised before its gradients were complete."""


class DesynchronizedError(StepError):
    """Ranks reduced with each other while they were in different steps."""


class ReplicasDifferError(DesynchronizedError):
    """Ranks hold parameters or buffers that differ; found with ``check_every``."""


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


class NormInputError(PacelineError, ValueError, RuntimeError):
    """A batch normalisation got an input whose statistics do not exist."""
