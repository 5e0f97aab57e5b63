"""A job as a whole: its membership, its records."""

from __future__ import annotations

from paceline.errors.base import PacelineError


class RecordsError(PacelineError, ValueError):
    """A rank's file of records (``rank0.events``) is missing, damaged, or of another version."""


class MembershipError(PacelineError, RuntimeError):
    """Elastic training cannot go on: the coordinator is gone, or there are too few ranks."""


class StateTransferError(MembershipError):
    """A state holds something that cannot be sent to another rank, or does not fit there."""


class CheckpointError(MembershipError):
    """A checkpoint of an elastic state cannot be written, found, or loaded, and why."""
