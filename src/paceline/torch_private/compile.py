"""Keeping torch.compile out of functions.

Decorators run at import: without the names that they need, functions stay as they are. Training
goes on; what torch.compile makes of it is then not known.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar, cast

from paceline.torch_private.names import find, is_there

_FRAMES = "torch._C._dynamo.eval_frame"
_disable = find("torch._disable_dynamo")
_set_strategy = find(f"{_FRAMES}.set_code_exec_strategy")
_strategy = find(f"{_FRAMES}._FrameExecStrategy")
_action = find(f"{_FRAMES}._FrameAction")
compiler_callback: Callable[[], Any] = find(f"{_FRAMES}.get_eval_frame_callback")
if not is_there(compiler_callback):
    compiler_callback = int  # every forward asks: only torch.compile is lost, which was told of
"""What torch.compile lets this thread call for every new frame; None while it is not at work."""

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """Keep torch.compile out of a function, and out of what it calls."""
    wrapped: Any = _disable(function) if is_there(_disable) else function
    return cast(F, wrapped)


def not_compiled_itself(function: F) -> F:
    """Keep torch.compile out of a function, but not out of what it calls."""
    wrapped: Any = _disable(function, recursive=False) if is_there(_disable) else function
    return cast(F, wrapped)


def never_compiled(function: F) -> F:
    """Keep torch.compile out of what autograd calls, of what that calls, and of functions inside.

    For hooks: a step that is compiled as a whole runs its backward, and them, under the compiler's
    eyes. Costs nothing, also no import of the compiler, which :func:`not_compiled` begins with.
    """
    if not all(map(is_there, (_set_strategy, _strategy, _action))):
        return function
    skip = _strategy(_action.SKIP, _action.SKIP)
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        _set_strategy(code, skip)
        codes += [inside for inside in code.co_consts if isinstance(inside, CodeType)]
    return function
