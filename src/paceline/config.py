"""Frozen policies: what the constructor's arguments mean, checked once.

Read by everything below the wrapper. Must not import torch.distributed or hold any tensor.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from paceline.errors import ConfigurationError

E = TypeVar("E", bound=enum.Enum)

BACKEND_NAME = "paceline"
"""Of our c10d backend: ``dist.init_process_group("paceline")``."""


class GradientViews(enum.Enum):
    """Where a parameter's gradient lives after a reduction (``gradient_as_bucket_view``)."""

    SAFE = "views, safely"
    """A view of the bucket; memory that a user still holds is left to them. The default."""

    ALWAYS = "views"
    """A view of the bucket, as torch does with True: the next step overwrites it."""

    NEVER = "copies"
    """A tensor of its own, as torch does with False."""

    @classmethod
    def from_argument(cls, value: bool | None) -> GradientViews:
        """Translate ``gradient_as_bucket_view``."""
        if value is None:
            return cls.SAFE
        return cls.ALWAYS if value else cls.NEVER


class NonFinite(enum.Enum):
    """What to do about NaN and infinity in gradients (``nonfinite``)."""

    IGNORE = "ignore"
    RAISE = "raise"
    SKIP = "skip"


class MissingGradients(enum.Enum):
    """When it is an error that parameters have no gradient (``missing_gradients``)."""

    RAISE = "raise"
    """At the end of that backward, on every rank. The default."""

    WAIT = "wait"
    """At the next forward, as torch does: a further backward may bring what is missing."""


class TransportChoice(enum.Enum):
    """What gradients travel over (``transport``)."""

    AUTO = "auto"
    """Shared memory between ranks of a host where that is possible. The default."""

    SHM = "shm"
    """Shared memory, or an error that says why not."""

    C10D = "c10d"
    """The process group, whatever it is."""


@dataclass(frozen=True)
class ReducePolicy:
    """Everything that decides how the reducer treats gradients.

    Attributes:
        views: Whether gradients are views of the buckets.
        find_unused: Ask the graph of every step which parameters it does not use.
        static_graph: Learn the graph in the first step, then rely on it.
        skip_unused: Do not reduce buckets in which no parameter is used; needs the same unused
            parameters on all ranks.
        nonfinite: What to do about NaN and infinity.
        missing: When missing gradients are an error.
        batched_copy: Copy all gradients of a bucket at once, however large.
    """

    views: GradientViews = GradientViews.SAFE
    find_unused: bool = False
    static_graph: bool = False
    skip_unused: bool = False
    nonfinite: NonFinite = NonFinite.IGNORE
    missing: MissingGradients = MissingGradients.RAISE
    batched_copy: bool = False

    @cached_property
    def tracks_unused(self) -> bool:
        """Whether parameters may go without a gradient."""
        return self.find_unused or self.static_graph

    @cached_property
    def searches_unused(self) -> bool:
        """Whether each backward is asked which parameters it leaves out."""
        return self.find_unused and not self.static_graph


def parse_choice(kind: type[E], argument: str, value: str) -> E:
    """Turn a string argument into its enum member, or say what may be written.

    Raises:
        ConfigurationError: If ``value`` is none of the members' values.
    """
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(repr(member.value) for member in kind)
        raise ConfigurationError(
            f"{argument}={value!r} is not known. Write one of: {choices}."
        ) from None
