"""The states of a step, and who may change them."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Where the reducer stands. Forwards (reducer.py) arm it, step_runner.py does the rest."""

    IDLE = enum.auto()
    """Nothing is expected. Entered at construction and when a step ends; gradients that arrive are
    local (``no_sync``). Left by a forward that will be synchronised, or by a backward through the
    output of one."""

    ARMED = enum.auto()
    """A forward has run that will be synchronised. Left when its backward reaches an output or a
    parameter, for REDUCING."""

    REDUCING = enum.auto()
    """A backward is running and buckets are being filled. Left at its end, for IDLE. Found by a
    forward outside of any backward, it means that the last backward raised."""

    WAITING = enum.auto()
    """Only with ``missing_gradients="wait"``: a backward ended and gradients are missing. A further
    backward goes on with REDUCING; a further forward is an error."""
