"""What torch keeps per thread, carried from the caller to the threads of the replicas.

Called by :mod:`paceline.dp.parallel_apply`. Grad mode, inference mode, autocast and the number of
intra-op threads belong to a thread; context variables too. Default dtype and the deterministic
flags belong to the process, so there is nothing to carry.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from paceline.dp.devices import accelerator_type
from paceline.dp.replica_threads import ReplicaThreads

T = TypeVar("T")


@dataclass(frozen=True)
class Autocast:
    """Autocast for one kind of device."""

    device_type: str
    is_enabled: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, device_type: str) -> Autocast:
        """Read the state of this thread."""
        enabled = torch.is_autocast_enabled(device_type)
        return cls(device_type, enabled, torch.get_autocast_dtype(device_type))


@dataclass(frozen=True)
class ThreadState:
    """The state of one thread, to be had by another."""

    grad: bool
    inference: bool
    autocast: tuple[Autocast, ...]
    autocast_cache: bool

    @classmethod
    def capture(cls) -> ThreadState:
        """Read the state of this thread."""
        accelerator = accelerator_type()
        kinds = ("cpu",) if accelerator is None else ("cpu", accelerator)
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(Autocast.of(kind) for kind in kinds),
            autocast_cache=torch.is_autocast_cache_enabled(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Have this state; a thread that stays may have been left in any other one."""
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for state in self.autocast:
                if state.is_enabled or torch.is_autocast_enabled(state.device_type):
                    stack.enter_context(self._autocast(state))
            torch.set_grad_enabled(self.grad)
            yield

    def _autocast(self, state: Autocast) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(
            state.device_type,
            dtype=state.dtype,
            enabled=state.is_enabled,
            cache_enabled=self.autocast_cache,
        )


def in_callers_context(job: Callable[[], T]) -> Callable[[], T]:
    """Let a job see the context variables that its maker sees now."""
    context = contextvars.copy_context()
    return lambda: context.run(job)


def shares_of(total: int, devices: Sequence[torch.device]) -> tuple[int, ...]:
    """Divide the intra-op threads among the replicas on the CPU; others need theirs only to launch.

    Every replica has at least one.
    """
    on_cpu = sum(device.type == "cpu" for device in devices)
    shares = []
    cpu_seen = 0
    for device in devices:
        if device.type != "cpu":
            shares.append(total)
            continue
        shares.append(max(1, total // on_cpu + (cpu_seen < total % on_cpu)))
        cpu_seen += 1
    return tuple(shares)


def divide_intraop_threads(threads: ReplicaThreads, devices: Sequence[torch.device]) -> None:
    """Give each thread its share of what the caller may use; cheap if it has it already.

    ``torch.set_num_threads`` sets the number of its own thread, and what threads begin with that
    have not computed yet. The latter is put back at once.
    """
    total = torch.get_num_threads()
    shares = shares_of(total, devices)
    if threads.shares == shares:
        return
    try:
        for outcome in threads.run([_setter(share) for share in shares]):
            if outcome.error is not None:
                raise outcome.error
    finally:
        torch.set_num_threads(total)
    threads.shares = shares


def _setter(share: int) -> Callable[[], None]:
    def set_share() -> None:
        torch.get_num_threads()  # a thread that has not computed would begin with the default
        torch.set_num_threads(share)

    return set_share
