"""Delayed reduction: some parameters travel together, when one gradient says that it is time.

``delay_all_reduce_named_params`` names parameters whose gradients live in one flat buffer per
dtype and device; when the gradient of ``param_to_hook_all_reduce`` is computed, the buffers are
averaged, and the end of the backward waits for them. The reducer knows nothing of these
parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from paceline.ddp.agree.init_sync import BROADCAST_CHUNK_BYTES
from paceline.ddp.features.optimizer_in_backward import step_parameters, take_over_optimizers
from paceline.ddp.reduce.sharing import fail_sharers
from paceline.torch_private.autograd import queue_callback
from paceline.torch_private.compile import never_compiled
from paceline.transport.messages import broadcast_tensors
from paceline.types import Reduction, Transport


class DelayedReduction:
    """Owns the buffers of the delayed parameters."""

    @torch.inference_mode(False)
    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        trigger: torch.Tensor,
        transport: Transport,
        is_synced: Callable[[], bool],
    ) -> None:
        self.transport = transport
        self._is_synced = is_synced
        self._flats: list[torch.Tensor] = []
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._in_flight: list[Reduction] = []
        self._steps_parameters = False
        detached = [parameter.detach() for parameter in parameters]
        what = "broadcast of delayed parameters"
        broadcast_tensors(transport.messages, what, detached, BROADCAST_CHUNK_BYTES, 0)
        self._allocate(parameters)
        reference = weakref.ref(self)

        def on_trigger(gradient: torch.Tensor) -> torch.Tensor:
            delayed = reference()
            if delayed is not None:
                delayed.start()
            return gradient

        trigger.register_hook(on_trigger)

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

    def take_over_optimizers(self) -> None:
        """Let optimizers that step in the backward wait for the average."""
        self._steps_parameters = take_over_optimizers(parameter for parameter, _ in self._views)

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
        fail_sharers([parameter for parameter, _ in self._views])
        for parameter, view in self._views:
            if parameter.grad is not None and parameter.grad is not view:
                view.copy_(parameter.grad)
                parameter.grad = view
        for flat in self._flats:
            flat.div_(self.transport.world)
            self._in_flight.append(self.transport.start(flat))
        queue_callback(self.wait)

    @never_compiled
    def wait(self) -> None:
        """Wait for the buffers."""
        in_flight, self._in_flight = self._in_flight, []
        for reduction in in_flight:
            reduction.wait()
        if self._steps_parameters:
            step_parameters(parameter for parameter, _ in self._views)
