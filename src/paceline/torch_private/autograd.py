"""The autograd engine: which backward runs, and what it runs in; also tensors below autograd."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.distributed import rpc

from paceline.torch_private.names import find

_will_execute = find("torch._C._will_engine_execute_node")
_interpreters = find("torch._C._functorch.peek_interpreter_stack")
_use_count = find("torch._C._storage_Use_Count")
_keep_versions = find("torch.autograd._unsafe_preserve_version_counter")
_foreach_copy = find("torch._foreach_copy_")
_functional_call = find("torch.nn.utils.stateless._functional_call")
_is_valid_context = find("torch.distributed.autograd._is_valid_context")
_current_context = find("torch.distributed.autograd._current_context")
_is_agent_set = find("torch.distributed.rpc.api._is_current_rpc_agent_set")


def will_run_node(node: Any) -> bool:
    """Whether the running backward executes this node. Raises for a leaf that is captured."""
    return bool(_will_execute(node))


backward_id: Callable[[], int] = find("torch._C._current_graph_task_id")
"""The number of the backward pass that this thread is running; -1 outside of any."""


def is_inside_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return int(backward_id()) != -1


def is_inside_functional_call() -> bool:
    """Whether a caller runs a module with tensors that are lent to it for this call.

    Nothing else tells: an ``nn.Parameter`` may be lent, too. Takes about 2 us.
    """
    lends = _functional_call.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is lends:
            return True
        frame = frame.f_back
    return False


def is_inside_transform() -> bool:
    """Whether this runs under torch.func.grad, vmap, or another transform of functions."""
    return _interpreters() is not None


def queue_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running now has ended without an exception."""
    Variable._execution_engine.queue_callback(callback)


# apply_boxed: since torch 2.13.
_PYTHON_BACKWARDS = {
    method.__code__
    for method in map(vars(BackwardCFunction).get, ("apply", "apply_boxed"))
    if method is not None
}


def enclosing_backward_node() -> Any:
    """The node, of the outermost backward, that runs this backward inside of it; None if none.

    Such a node is a ``torch.autograd.Function`` whose backward calls ``backward()`` again. The
    engine does not say; the stack of this thread does.
    """
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        if frame.f_code in _PYTHON_BACKWARDS:
            found = frame.f_locals["self"]
        frame = frame.f_back
    return found


def storage_references(storage: torch.UntypedStorage) -> int:
    """How many tensors, and a constant, refer to this memory."""
    return int(_use_count(storage._cdata))


def tensor_exchange() -> Any:
    """The capsule with which C code asks DLPack where tensors lie; None if torch has none."""
    return getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


def preserve_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Change tensors in place without autograd noticing."""
    context: AbstractContextManager[None] = _keep_versions(tuple(tensors))
    return context


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensor by tensor, in one call."""
    _foreach_copy(list(targets), list(sources))


def see_accumulated(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether hooks of users are told of ``parameter.grad`` after each backward."""
    return any(map(_hooks_after, parameters))


def have_gradient_hooks(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether hooks of users see gradients, before or after they are accumulated."""
    return see_accumulated(parameters) or any(map(_hooks_before, parameters))


_hooks_after = attrgetter("_post_accumulate_grad_hooks")
_hooks_before = attrgetter("_backward_hooks")


def stored_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the entries of a sparse tensor are, and what they are; also if it is not coalesced."""
    return tensor._indices(), tensor._values()


def stored_entries(tensor: torch.Tensor) -> int:
    """How many entries a sparse tensor stores."""
    return tensor._nnz()


def context_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients in a distributed autograd context: its own tensors, not copies.

    Empty if the context has ended: a step whose backward raised is completed after that, for the
    sake of the other ranks.
    """
    try:
        _is_valid_context(context_id)
    except RuntimeError:
        return {}
    return dict(dist_autograd.get_gradients(context_id))  # type: ignore[attr-defined]


def current_context_id() -> int | None:
    """The distributed autograd context that the caller is in.

    Valid in a forward only: the threads of a distributed backward are in no context.
    """
    if not rpc.is_available() or not _is_agent_set():
        return None
    try:
        return int(_current_context()._context_id())
    except RuntimeError:
        return None


def optimizer_hook_handles(parameter: torch.Tensor) -> list[Any]:
    """The hooks with which ``_apply_optimizer_in_backward`` would step this parameter.

    Its module takes a second to import; whoever has used it has imported it.
    """
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    if module is None:
        return []
    return list(module.param_to_optim_hook_handle_map.get(parameter, []))
