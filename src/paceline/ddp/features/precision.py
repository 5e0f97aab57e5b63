"""Mixed precision: parameters are low precision while a step computes, full precision outside.

Before a forward every parameter's data is exchanged for a low-precision copy, so modules,
activation checkpointing and autograd see ordinary low-precision parameters; when the backward is
over, the full data comes back. Gradients arrive in low precision, are reduced in ``reduce_dtype``
and handed out in full precision.

[Note: exchanged data] To exchange a parameter's data for another dtype makes autograd forget the
parameter's AccumulateGrad node, and our hook with it. The wrapper therefore hooks the parameters
anew after every exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from paceline.buckets import Slot
from paceline.config import GradientViews
from paceline.ddp.autograd.hooks import hook_outputs, output_nodes
from paceline.errors import SharedParametersError
from paceline.torch_private.autograd import queue_callback
from paceline.torch_private.modules import MixedPrecisionConfig, cast_inputs


def reduce_dtype(config: MixedPrecisionConfig | None, parameter: torch.Tensor) -> torch.dtype:
    """The dtype in which a parameter's gradient is reduced."""
    if config is None:
        return parameter.dtype
    return config.reduce_dtype or config.param_dtype or parameter.dtype


class PrecisionSwap:
    """Exchanges the data of a module's parameters.

    ``_fp_param`` and ``_mp_param`` on a parameter are names that torch's users and tests know.
    """

    def __init__(self, config: MixedPrecisionConfig, module: torch.nn.Module) -> None:
        self.config = config
        self._module = module
        self._kept: dict[torch.Tensor, torch.Tensor] = {}
        self._is_low = self._has_entered = False
        for parameter in self._managed():
            low = torch.zeros_like(parameter, dtype=config.param_dtype, requires_grad=False)
            low.untyped_storage().resize_(0)
            parameter._mp_param = low  # type: ignore[attr-defined]
            parameter._fp_param = parameter.data  # type: ignore[attr-defined]
        for buffer in module.buffers():
            if not hasattr(buffer, "_ddp_ignored") and buffer.is_floating_point():
                buffer.data = buffer.to(dtype=config.buffer_dtype)
        module.register_state_dict_pre_hook(lambda *_: self.leave())

    def cast_inputs(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast floating-point inputs of the module."""
        if self.config.param_dtype is None:
            return inputs, kwargs
        return cast_inputs(self.config.param_dtype, inputs, kwargs)

    def enter(self) -> bool:
        """Exchange full for low precision; gradients that are there wait aside.

        Returns:
            Whether that was done now: a backward of an earlier forward may be still to come.

        Raises:
            SharedParametersError: If another wrapper has exchanged a parameter's data already.
        """
        self._has_entered = not self._is_low
        if self._is_low:
            return False
        self._check_owner()
        self._is_low = True
        with torch.no_grad():
            for parameter in self._managed():
                if parameter.grad is not None:
                    self._kept[parameter] = parameter.grad
                    parameter.grad = None
                low: torch.Tensor = parameter._mp_param  # type: ignore[attr-defined]
                parameter._fp_param = parameter.data  # type: ignore[attr-defined]
                low.untyped_storage().resize_(low.numel() * low.itemsize)
                low.copy_(parameter.data)
                parameter.data = low
        return True

    def _check_owner(self) -> None:
        for name, parameter in self._module.named_parameters():
            low = getattr(parameter, "_mp_param", None)
            if low is not None and low.untyped_storage().size() and _is_same(parameter, low):
                raise SharedParametersError(
                    f"{name} is in low precision already: another wrapper with mixed_precision "
                    "shares it, and the backward pass of that one's forward has not run. To "
                    "exchange its data once more would lose the full precision. Run one forward "
                    "and backward pass for each, or one wrapper around both models.",
                    parameters=(name,),
                )

    def leave(self) -> None:
        """Bring full precision back, and add gradients that stayed local to those of before."""
        if not self._is_low:
            return
        self._is_low = False
        with torch.no_grad():
            for parameter in self._managed():
                gradient, kept = parameter.grad, self._kept.get(parameter)
                self.restore(parameter)
                if gradient is None or gradient.dtype == parameter.dtype:
                    parameter.grad = gradient if gradient is not None else kept
                else:
                    full = gradient.to(parameter.dtype)
                    parameter.grad = full if kept is None else kept.add_(full)
        self._kept.clear()

    def leave_after(self, output: Any) -> None:
        """A forward that is not synchronised: full precision returns after its backward, if any."""
        nodes = output_nodes(output)
        if torch.is_grad_enabled() and nodes:
            hook_outputs(nodes, self, leads_to_parameters=False)
        elif self._has_entered:
            self.leave()

    def restore(self, parameter: torch.Tensor) -> None:
        """Bring back one parameter's data; its low-precision gradient is dropped."""
        low: torch.Tensor = parameter._mp_param  # type: ignore[attr-defined]
        if parameter.data_ptr() != low.data_ptr() or low.untyped_storage().size() == 0:
            return
        parameter.grad = None
        parameter.data = parameter._fp_param  # type: ignore[attr-defined]
        if parameter._fp_param.data_ptr() != low.data_ptr():  # type: ignore[attr-defined]
            low.untyped_storage().resize_(0)

    def kept_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The full-precision gradient from before this step, which waits aside."""
        return self._kept.get(parameter)

    def take_kept(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The same, for good: it is part of a result, which takes its place."""
        return self._kept.pop(parameter, None)

    def on_gradients(self) -> None:
        """Part of the AutogradListener protocol; single gradients are the reducer's business."""

    def on_output(self, leads_to_parameters: bool) -> None:
        """A backward without synchronisation has begun: come back at its end."""
        queue_callback(self.leave)

    def _managed(self) -> Iterator[torch.nn.Parameter]:
        for parameter in self._module.parameters():
            if not hasattr(parameter, "_ddp_ignored") and parameter.is_floating_point():
                yield parameter


def _is_same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.data_ptr() == two.data_ptr()


class PrecisionAccess:
    """Gradients that arrive in low precision and leave in full precision."""

    keeps_gradients = False
    is_direct = False
    exchanges_data = True

    def __init__(self, swap: PrecisionSwap, views: GradientViews) -> None:
        self._swap = swap
        self._gives_views = views is not GradientViews.NEVER

    def gradient(self, slot: Slot) -> torch.Tensor | None:
        """The gradient of this step and the one that waits aside, together."""
        gradient, kept = slot.parameter.grad, self._swap.kept_gradient(slot.parameter)
        if gradient is None or kept is None:
            return kept if gradient is None else gradient
        return (kept + gradient.to(kept.dtype)).to(slot.spec.dtype)

    def has_gradient(self, slot: Slot) -> bool:
        """Whether this step brought one."""
        return slot.parameter.grad is not None

    def copy_in(self, slots: Sequence[Slot], factor: float) -> list[Slot]:
        """Cast into the views; all is to be published, once the full data is back."""
        for slot in slots:
            view = slot.view
            assert view is not None
            gradient, kept = slot.parameter.grad, self._swap.kept_gradient(slot.parameter)
            if gradient is not None:
                view.copy_(gradient)
                if kept is not None:
                    view.add_(kept)
            elif kept is not None:
                view.copy_(kept)
            else:
                view.zero_()
            if factor != 1.0:
                view.mul_(factor)
        return list(slots)

    def publish(self, slots: Sequence[Slot]) -> None:
        """Bring the full data back and hand out full-precision gradients."""
        for slot in slots:
            parameter, view = slot.parameter, slot.view
            assert view is not None
            kept = self._swap.take_kept(parameter)
            self._swap.restore(parameter)
            if kept is not None and not self._gives_views:
                parameter.grad = kept.copy_(view)
            elif view.dtype == parameter.dtype and self._gives_views:
                parameter.grad = view
            else:
                parameter.grad = view.to(parameter.dtype, copy=True)

    def publish_sparse(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Hand out a sparse gradient in full precision."""
        self._swap.take_kept(slot.parameter)
        self._swap.restore(slot.parameter)
        slot.parameter.grad = gradient.to(slot.parameter.dtype)
