"""``DataParallel``: inputs, outputs and replicas that do not fit together."""

from __future__ import annotations

from paceline.errors.base import PacelineError


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
