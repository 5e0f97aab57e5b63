"""Module buffers: broadcast before a forward, or given to a hook.

Owned by the wrapper. Must not know about gradients.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

from paceline.ddp.agree.init_sync import BROADCAST_CHUNK_BYTES
from paceline.torch_private.autograd import preserve_versions
from paceline.torch_private.modules import BufferHookLocation
from paceline.transport.messages import broadcast_tensors
from paceline.types import BufferHook, Transport


class Moment(enum.Enum):
    """When buffers may be synchronised."""

    BEFORE_FORWARD = BufferHookLocation.PRE_FORWARD
    AFTER_FORWARD = BufferHookLocation.POST_FORWARD


@dataclass(frozen=True)
class RegisteredBufferHook:
    """A user's replacement for the broadcast."""

    hook: BufferHook
    state: Any
    moment: Moment


class BufferSync:
    """Keeps the buffers of a module equal on all ranks."""

    def __init__(self, module: torch.nn.Module, ignored: set[str], transport: Transport) -> None:
        self._module = module
        self._ignored = ignored
        self.transport = transport
        self.hook: RegisteredBufferHook | None = None
        self.named: dict[str, torch.Tensor] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look the buffers up again: a module may have replaced some."""
        self.named = {
            name: buffer
            for name, buffer in self._module.named_buffers()
            if name not in self._ignored
        }

    def is_due(self, moment: Moment) -> bool:
        """Whether there is something to synchronise at this moment."""
        due = self.hook.moment if self.hook else Moment.BEFORE_FORWARD
        return bool(self.named) and due is moment

    def sync(self, source: int) -> list[torch.futures.Future[Any]]:
        """Synchronise now; return what must be waited for before the step ends.

        A graph that holds a buffer (BatchNorm) stays valid: a second forward before the first
        backward is no error.
        """
        self.refresh()
        buffers = tuple(self.named.values())
        with torch.no_grad(), preserve_versions(buffers):
            return self.run(source)

    def run(self, source: int) -> list[torch.futures.Future[Any]]:
        """Run the hook, or broadcast from ``source``."""
        if self.hook is not None:
            return list(self.hook.hook(self.hook.state, self.named) or [])
        self.broadcast(list(self.named.values()), BROADCAST_CHUNK_BYTES, source)
        return []

    def broadcast(self, tensors: list[torch.Tensor], chunk_bytes: int, source: int) -> None:
        """Copy tensors from one rank to all, many in one message."""
        messages = self.transport.messages
        broadcast_tensors(messages, "broadcast of buffers", tensors, chunk_bytes, source)
