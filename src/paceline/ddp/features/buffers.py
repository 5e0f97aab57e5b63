"""Module buffers: broadcast before a forward, or given to a hook.

Owned by the wrapper. Must not know about gradients.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class BufferPlace(NamedTuple):
    """Where a module holds a buffer."""

    holder: dict[str, torch.Tensor | None]
    key: str

    def get(self) -> torch.Tensor | None:
        """Return what is there now."""
        return self.holder.get(self.key)

    def put(self, buffer: torch.Tensor | None) -> None:
        """Let the module have another one."""
        self.holder[self.key] = buffer

    def remove(self) -> None:
        """Let the module have none of this name."""
        self.holder.pop(self.key, None)


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

    def places(self) -> dict[str, BufferPlace]:
        """Return where buffers are held, by name; those that are None, too."""
        found: dict[str, BufferPlace] = {}
        seen: set[int] = set()
        for prefix, module in self._module.named_modules():
            for key, buffer in module._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if name not in self._ignored and id(buffer) not in seen:
                    found[name] = BufferPlace(module._buffers, key)
                    seen |= set() if buffer is None else {id(buffer)}
        return found

    def holders(self) -> list[dict[str, torch.Tensor | None]]:
        """Return what modules hold their buffers in."""
        return [module._buffers for module in self._module.modules()]

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
