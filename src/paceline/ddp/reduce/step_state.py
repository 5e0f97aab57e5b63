"""The states of a step, and who may change them."""

from __future__ import annotations

import contextlib
import enum

import torch


class StepPhase(enum.Enum):
    """Where the reducer stands. Forwards (reducer.py) announce a step, step_runner.py runs it."""

    IDLE = enum.auto()
    """Nothing is expected. Entered at construction and when a step ends; gradients that arrive are
    local (``no_sync``). Left by a forward that will be synchronised, or by a backward through the
    output of one."""

    EXPECTING = enum.auto()
    """A forward has run that will be synchronised. Left when its backward reaches an output or a
    parameter, for REDUCING."""

    REDUCING = enum.auto()
    """A backward is running and buckets are being filled. Left at its end, for IDLE. Found by a
    forward outside of any backward, it means that the last backward raised."""

    WAITING = enum.auto()
    """Only with ``missing_gradients="wait"``: a backward ended and gradients are missing. A further
    backward goes on with REDUCING; a further forward is an error."""

    HELD = enum.auto()
    """Only with ``require_manual_backward_finalization``: a backward ended, and all of its buckets
    are on their way. Left by ``finalize_backward()``, for IDLE. Until then a further backward, or
    a forward that will be synchronised, is an error."""


_NOTHING = contextlib.nullcontext()


def without_graph() -> contextlib.AbstractContextManager[None]:
    """Nothing of a step is to be differentiated; in most backward passes that is so already."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING
