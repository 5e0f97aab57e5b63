"""Delayed reduction: some parameters travel together, when one gradient says that it is time.

``delay_all_reduce_named_params`` names parameters whose gradients live in one flat buffer per
dtype and device; when the gradient of ``param_to_hook_all_reduce`` is computed, the buffers are
averaged, and the end of the backward waits for them. The reducer knows nothing of these
parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.ddp.init_sync import BROADCAST_CHUNK_BYTES
from paceline.torch_private import broadcast_coalesced, queue_callback
from paceline.types import Reduction, Transport


class DelayedReduction:
    """Owns the buffers of the delayed parameters."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        trigger: torch.Tensor,
        group: dist.ProcessGroup,
        transport: Transport,
        is_synced: Callable[[], bool],
    ) -> None:
        self.transport = transport
        self._is_synced = is_synced
        self._flats: list[torch.Tensor] = []
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._in_flight: list[Reduction] = []
        detached = [parameter.detach() for parameter in parameters]
        broadcast_coalesced(group, detached, BROADCAST_CHUNK_BYTES, 0)
        self._allocate(parameters)
        reference = weakref.ref(self)

        def on_trigger(gradient: torch.Tensor) -> torch.Tensor:
            delayed = reference()
            if delayed is not None:
                delayed.start()
            return gradient

        self._handle = trigger.register_hook(on_trigger)

    def _allocate(self, parameters: Sequence[torch.Tensor]) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter in parameters:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for (dtype, device), members in groups.items():
            flat = self.transport.allocate(sum(p.numel() for p in members), dtype, device)
            self._flats.append(flat)
            offset = 0
            for member in members:
                view = flat[offset : offset + member.numel()].view(member.shape)
                self._views.append((member, view))
                offset += member.numel()

    def lend_views(self) -> None:
        """After a forward: parameters without a gradient accumulate straight into the buffers."""
        for parameter, view in self._views:
            if parameter.grad is None:
                view.zero_()
                parameter.grad = view

    @torch.no_grad()
    def start(self) -> None:
        """The moment has come: average the buffers, and have the backward wait for them."""
        if not self._is_synced():
            return
        for parameter, view in self._views:
            if parameter.grad is not None and parameter.grad is not view:
                view.copy_(parameter.grad)
                parameter.grad = view
        for flat in self._flats:
            flat.div_(self.transport.world)
            self._in_flight.append(self.transport.start(flat))
        queue_callback(self.wait)

    def wait(self) -> None:
        """Wait for the buffers."""
        in_flight, self._in_flight = self._in_flight, []
        for reduction in in_flight:
            reduction.wait()

    def remove(self) -> Any:
        """Stop listening to the trigger."""
        self._handle.remove()
