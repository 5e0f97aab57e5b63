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


TRANSPORT_VARIABLE = "PACELINE_TRANSPORT"
"""The environment variable that says what ``transport="auto"`` means; ``paceline run`` sets it."""


class TransportChoice(enum.Enum):
    """What gradients travel over (``transport``)."""

    AUTO = "auto"
    """Shared memory between ranks of a host where that is possible. The default."""

    SHM = "shm"
    """Shared memory, or an error that says why not."""

    C10D = "c10d"
    """The process group, whatever it is."""


MAX_SHARDS = 4096


@dataclass(frozen=True)
class Shards:
    """Training as logical shards (``shards``): the same bits at any number of ranks.

    What two runs must have in common to end with the same bits, besides model and data.

    Attributes:
        count: How many shards a batch is cut into: the largest number of ranks.
        seed: Of the shards' random streams.
        threads: Threads of torch, for the whole process: kernels change their bits with it.
        deterministic: Let torch refuse operations that may give other bits each time
            (``torch.use_deterministic_algorithms``), for the whole process.
        checksum_every: Rounds between two that ``paceline verify`` can compare; 0: none. Costs
            nothing without a run folder.
        checksum_gradients_every: The same for the gradients of each shard; 0: none.
    """

    count: int
    seed: int = 0
    threads: int = 1
    deterministic: bool = True
    checksum_every: int = 1
    checksum_gradients_every: int = 100

    def __post_init__(self) -> None:
        if type(self.count) is not int or not 1 <= self.count <= MAX_SHARDS:
            raise ConfigurationError(
                f"shards={self.count!r} is no number of shards: write 1 to {MAX_SHARDS}, for "
                "example shards=8, the largest number of ranks that this training will have."
            )
        if type(self.threads) is not int or self.threads < 1:
            raise ConfigurationError(
                f"Shards(threads={self.threads!r}): write the number of threads that each rank's "
                "operations use, the same in all runs that are to be compared, for example 1."
            )
        for name in ("checksum_every", "checksum_gradients_every"):
            found = getattr(self, name)
            if type(found) is not int or found < 0:
                raise ConfigurationError(
                    f"Shards({name}={found!r}): write a number of rounds, or 0."
                )
        if type(self.seed) is not int:
            raise ConfigurationError(f"Shards(seed={self.seed!r}): a seed is a whole number.")


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
        lazy_buckets: Buckets have memory from their first gradient to the end of the step only.
        check_every: Steps between two comparisons of the ranks' parameters; 0 for never.
        shards: Add gradients up by the tree of these shards.
    """

    views: GradientViews = GradientViews.SAFE
    find_unused: bool = False
    static_graph: bool = False
    skip_unused: bool = False
    nonfinite: NonFinite = NonFinite.IGNORE
    missing: MissingGradients = MissingGradients.RAISE
    batched_copy: bool = False
    lazy_buckets: bool = False
    check_every: int = 0
    shards: Shards | None = None

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
        ConfigurationError: If ``value`` is not the value of a member.
    """
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(repr(member.value) for member in kind)
        raise ConfigurationError(
            f"{argument}={value!r} is not known. Write one of: {choices}."
        ) from None
