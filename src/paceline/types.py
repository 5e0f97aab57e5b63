"""The protocols that layers meet at. No behaviour, no imports from the rest of the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

CommHook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]
"""``hook(state, bucket) -> future``: replaces the reduction of a bucket."""

BufferHook = Callable[[Any, dict[str, torch.Tensor]], "list[torch.futures.Future[Any]] | None"]
"""``hook(state, named_buffers)``: replaces the broadcast of buffers."""


class JoinMirror(Protocol):
    """For modules that talk to other ranks by themselves: their part in a join context.

    A class of modules that has a ``mirror_for_join(module) -> JoinMirror`` is asked for one by the
    wrapper, on every rank, when a join context is made.
    """

    def mirror_step(self) -> None:
        """Do for the other ranks what this module does in a step, with nothing to contribute."""

    def leave(self) -> None:
        """The join context has ended on every rank."""


class ShardExchange(Protocol):
    """How a SyncBatchNorm talks to all logical shards, while a wrapper runs them in turns.

    The wrapper sets it on every such layer (``over_shards``) for a round.

    Attributes:
        always_sums: Call :meth:`sum` in every backward, though an input needs no gradient: that of
            another shard may.
    """

    always_sums: bool

    @property
    def is_first(self) -> bool:
        """Whether the shard that runs is this rank's first: it alone keeps running statistics."""

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the rows of all shards, in their order."""

    def sum(self, values: torch.Tensor) -> None:
        """Replace the values by their sum over all shards."""


class Reduction(Protocol):
    """A reduction in flight, as :meth:`Transport.start` hands it out."""

    def wait(self) -> None:
        """Block until the sum is in the buffer, or raise; bounded by the group's time-out."""

    def is_done(self) -> bool:
        """Say whether :meth:`wait` would return at once. Never blocks."""

    def on_done(self, callback: Callable[[int], None]) -> None:
        """Tell ``callback`` once when the sum was in the buffer (``time.perf_counter_ns``).

        At that moment, from any thread; or later, at the latest inside of :meth:`wait`.
        """


class Messages(Protocol):
    """What ranks send each other besides gradients. Every call is a collective, and blocks.

    ``what`` is for errors: "broadcast of buffers". A rank that has died is named by PeerLostError.
    """

    @property
    def rank(self) -> int:
        """This process's rank in the group."""

    @property
    def world(self) -> int:
        """How many ranks there are."""

    def gather(self, what: str, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in rank order; all have one size and dtype."""

    def broadcast(self, what: str, tensor: torch.Tensor, source: int) -> None:
        """Copy one rank's tensor to all."""

    def maximum(self, what: str, tensor: torch.Tensor) -> None:
        """Replace each element by its maximum over all ranks."""


class Transport(Protocol):
    """All that the reducer knows about how buckets travel.

    One implementation wraps a c10d group, another one shares memory inside of a host. The reducer
    must not ask which one it has.
    """

    @property
    def name(self) -> str:
        """What ``ddp.stats()`` shows, for example ``"c10d:gloo"``."""

    @property
    def reason(self) -> str:
        """Why it is this transport and no other; shown beside the name."""

    @property
    def rank(self) -> int:
        """This process's rank in the group."""

    @property
    def world(self) -> int:
        """How many ranks reduce with each other."""

    @property
    def messages(self) -> Messages:
        """For what is no gradient."""

    @property
    def late_bytes(self) -> int:
        """Up to this size it saves no time to start the last bucket before the backward is over."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return flat, zeroed memory for one bucket. Called in plan order on every rank."""

    def start(self, flat: torch.Tensor) -> Reduction:
        """Begin to sum ``flat`` over all ranks, in place. Ranks call in the same order."""

    def start_last(self, flat: torch.Tensor) -> Reduction:
        """Like :meth:`start`, for the last sum of a step: the caller has nothing to do but wait.

        It may begin only inside of :meth:`Reduction.wait`, done by the thread that waits.
        """

    def start_all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Reduction:
        """Begin to send ``inputs[i]`` to rank i and to receive ``outputs[i]`` from it.

        Flat tensors, whose sizes may differ. Outputs are there after :meth:`Reduction.wait`.
        """

    def start_sparse(self, gradient: torch.Tensor) -> Reduction:
        """Begin to sum a sparse tensor over all ranks; afterwards ``gradient`` holds the sum."""
