"""Decides what a wrapper's buckets travel over (``transport="auto" | "shm" | "c10d"``).

Every rank comes to the same decision, and ``ddp.stats()`` says which and why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.config import BACKEND_NAME, TransportChoice
from paceline.errors import ConfigurationError, SharedMemoryError
from paceline.liveness import watch_of
from paceline.liveness.roster import Gather
from paceline.native.extension import DISABLE_VARIABLE
from paceline.shm import SharingRefusal, connect
from paceline.shm.collectives.chunked import HEAP_BYTES
from paceline.shm.collectives.cross_host import CHANNELS
from paceline.transport.c10d import C10dTransport
from paceline.transport.exchange import gather_json
from paceline.transport.messages import GroupMessages
from paceline.transport.shm import ShmTransport
from paceline.types import Messages, Reduction, Transport

SHARED_BACKENDS = ("gloo", BACKEND_NAME)
HEAP_SLACK_BYTES = HEAP_BYTES + (32 << 20)
HEAP_COPIES = 3
"""Room for the buckets, for those of the plan before, and for gradients that somebody still holds.
Reserved, not taken: memory is used when it is touched."""


class DeferredTransport:
    """A transport that is chosen at its first use, or by :meth:`resolve`.

    To choose is a collective. A wrapper that a single rank copies or unpickles must not begin one,
    so the choice waits until all ranks are in a backward together.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        choice: TransportChoice,
        device: torch.device,
        gradient_bytes: int,
    ) -> None:
        self.rank: int = group.rank()
        self.world: int = group.size()
        self._choose: Callable[[], Transport] = lambda: choose_transport(
            group, choice, device, gradient_bytes
        )
        self._chosen: Transport | None = None
        self._group_messages = GroupMessages(group)

    @property
    def name(self) -> str:
        """See :class:`paceline.types.Transport`."""
        return self._chosen.name if self._chosen else "not chosen before the first backward"

    @property
    def reason(self) -> str:
        """See :class:`paceline.types.Transport`."""
        return self._chosen.reason if self._chosen else ""

    @property
    def messages(self) -> Messages:
        """Over the process group, until all ranks have chosen something better."""
        return self._chosen.messages if self._chosen else self._group_messages

    @property
    def late_bytes(self) -> int:
        """See :class:`paceline.types.Transport`; not a reason to choose now."""
        return self._chosen.late_bytes if self._chosen else 0

    def resolve(self) -> Transport:
        """Choose now. Collective, the first time."""
        if self._chosen is None:
            self._chosen = self._choose()
        return self._chosen

    def abort(self) -> None:
        """End shared memory for all ranks of this host; who waits there raises. From any thread."""
        if isinstance(self._chosen, ShmTransport):
            self._chosen.abort()

    def close(self, error: BaseException | None = None) -> None:
        """Leave shared memory, if it was chosen: peers that wait there are told."""
        if isinstance(self._chosen, ShmTransport):
            self._chosen.close(error)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See :class:`paceline.types.Transport`."""
        return self.resolve().allocate(numel, dtype, device)

    def start(self, flat: torch.Tensor) -> Reduction:
        """See :class:`paceline.types.Transport`."""
        return self.resolve().start(flat)

    def start_last(self, flat: torch.Tensor) -> Reduction:
        """See :class:`paceline.types.Transport`."""
        return self.resolve().start_last(flat)

    def start_all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Reduction:
        """See :class:`paceline.types.Transport`."""
        return self.resolve().start_all_to_all(outputs, inputs)

    def start_sparse(self, gradient: torch.Tensor) -> Reduction:
        """See :class:`paceline.types.Transport`."""
        return self.resolve().start_sparse(gradient)


def choose_transport(
    group: dist.ProcessGroup, choice: TransportChoice, device: torch.device, gradient_bytes: int
) -> Transport:
    """Choose and build. Collective over ``group``.

    Raises:
        SharedMemoryError: On every rank, if ``transport="shm"`` cannot be had.
        ConfigurationError: On every rank, if ranks ask for different things.
    """
    messages = GroupMessages(group)

    def gather(value: Any) -> list[Any]:
        return gather_json(messages, "construction", value, device)

    if group.size() > 1:
        watch_of(group).meet(gather)
        _check_agreement(gather, choice, device)
    refusal = _refuse_unasked(group, choice, device)
    if refusal is None:
        heap_bytes = HEAP_COPIES * gradient_bytes + HEAP_SLACK_BYTES
        found = connect(group.rank(), gather, heap_bytes=heap_bytes, channels=CHANNELS)
        if not isinstance(found, SharingRefusal):
            return ShmTransport(found, group)
        refusal = found.reason
        if found.is_fault and choice is TransportChoice.AUTO and group.rank() == 0:
            warnings.warn(
                f"Gradients travel over {dist.get_backend(group)}, not through shared memory: "
                f"{refusal}. Set {DISABLE_VARIABLE}=1 or transport='c10d' to be silent about it.",
                stacklevel=2,
            )
    if choice is TransportChoice.SHM:
        raise SharedMemoryError(
            f"Rank {group.rank()}: transport='shm' was asked for, but {refusal}. "
            "Use transport='auto' to go on without shared memory.",
            rank=group.rank(),
        )
    return C10dTransport(group, refusal)


def _check_agreement(gather: Gather, choice: TransportChoice, device: torch.device) -> None:
    answers = gather([choice.value, device.type])
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise ConfigurationError(
                f"Ranks want different transports: rank 0 transport={answers[0][0]!r} on "
                f"{answers[0][1]}, rank {rank} transport={answer[0]!r} on {answer[1]}. Give the "
                "same on all ranks.",
                rank=rank,
            )


def _refuse_unasked(
    group: dist.ProcessGroup, choice: TransportChoice, device: torch.device
) -> str | None:
    """Say why shared memory is not even tried."""
    backend = dist.get_backend(group)
    if choice is TransportChoice.C10D:
        return "transport='c10d' was asked for"
    if device.type != "cpu":
        return f"gradients are on {device.type}, not on the CPU"
    if choice is TransportChoice.AUTO and group.size() == 1:
        return "there is one rank"
    if choice is TransportChoice.AUTO and backend not in SHARED_BACKENDS:
        return f"the group's backend is {backend}"
    return None
