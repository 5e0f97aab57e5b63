"""What torch keeps per thread, carried from a caller to threads that work for it.

Called by ``dp`` for the threads of replicas, and by ``shards`` for those of shards. Grad mode,
inference mode and autocast belong to a thread; context variables too. Default dtype and the
deterministic flags belong to the process, so there is nothing to carry. New threads begin with the
process's number of intra-op threads.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

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
        found = torch.accelerator.current_accelerator(check_available=True)
        kinds = ("cpu",) if found is None else ("cpu", found.type)
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
