"""Makes a forward's output depend on parameters that it does not use, with gradients of zero.

Called by the reducer under distributed autograd, with ``find_unused_parameters=True`` or
``static_graph=True``. A context takes gradients from the engine alone: a parameter that this rank
did not use would have no tensor there, so the average of those who did use it could not be shown,
and ranks would drift apart. Attached, it has one. The price: a parameter that no rank has used has
a gradient of zeros in the context instead of none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import rpc

from paceline.containers import contents, is_owned_rref, rebuild, tensors_in
from paceline.ddp.reduce.sparse import empty_sparse

Change = Callable[[torch.Tensor], torch.Tensor]


def attach_unreached(
    output: Any, parameters: Sequence[torch.Tensor], nodes: Sequence[Any], sparse: Sequence[bool]
) -> Any:
    """Return ``output`` with a tensor in it that hangs on all parameters that none hangs on.

    Args:
        output: Of the forward.
        parameters: All of the reducer's.
        nodes: Their AccumulateGrad nodes.
        sparse: Which of them have sparse gradients.
    """
    roots = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
    reached = _reached(roots)
    missing = [at for at, node in enumerate(nodes) if node not in reached]
    if not missing:
        return output
    layouts = [sparse[at] for at in missing]
    wanted = [parameters[at] for at in missing]
    return _change_first(output, lambda tensor: _attach(layouts, tensor, wanted))[0]


def _reached(roots: Sequence[Any]) -> set[Any]:
    """Return every node below ``roots``. What is used by way of another process is not seen."""
    seen: set[Any] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(following for following, _ in node.next_functions)
    return seen


def _change_first(value: Any, change: Change) -> tuple[Any, bool]:
    """Rebuild a value with its first floating-point tensor changed; say whether there was one."""
    if isinstance(value, torch.Tensor):
        fits = value.is_floating_point() or value.is_complex()
        return (change(value), True) if fits else (value, False)
    if is_owned_rref(value):
        inside, changed = _change_first(value.local_value(), change)
        return (rpc.RRef(inside), True) if changed else (value, False)
    parts = contents(value) or []
    for at, part in enumerate(parts):
        new, changed = _change_first(part, change)
        if changed:
            return rebuild(value, [*parts[:at], new, *parts[at + 1 :]]), True
    return value, False


def _attach(
    sparse: list[bool], tensor: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> torch.Tensor:
    attached: torch.Tensor = _Attach.apply(sparse, tensor, *parameters)  # type: ignore[no-untyped-call]
    return attached


class _Attach(torch.autograd.Function):
    """Hands its tensor on, and in backward gives every parameter zeros."""

    @staticmethod
    def forward(
        ctx: Any, sparse: list[bool], tensor: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.sparse, ctx.parameters = sparse, parameters
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        kinds = zip(ctx.sparse, ctx.parameters, strict=True)
        return None, gradient, *(empty_sparse(p) if s else torch.zeros_like(p) for s, p in kinds)
