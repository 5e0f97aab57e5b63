"""Keeping torch.compile out of functions."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar, cast

import torch

compiler_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""What torch.compile lets this thread call for every new frame; None while it is not at work."""

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """Keep torch.compile out of a function, and out of what it calls."""
    wrapped: Any = torch._disable_dynamo(function)  # type: ignore[attr-defined]
    return cast(F, wrapped)


def not_compiled_itself(function: F) -> F:
    """Keep torch.compile out of a function, but not out of what it calls."""
    wrapped: Any = torch._disable_dynamo(function, recursive=False)  # type: ignore[attr-defined]
    return cast(F, wrapped)


def never_compiled(function: F) -> F:
    """Keep torch.compile out of what autograd calls, of what that calls, and of functions inside.

    For hooks: a step that is compiled as a whole runs its backward, and them, under the compiler's
    eyes. Costs nothing, also no import of the compiler, which :func:`not_compiled` begins with.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        frames.set_code_exec_strategy(code, skip)
        codes += [inside for inside in code.co_consts if isinstance(inside, CodeType)]
    return function
