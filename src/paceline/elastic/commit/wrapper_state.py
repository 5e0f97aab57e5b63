"""What wrappers remember from step to step: hooks, the scale of weights, skipped steps, rounds.

Kept at every commit by :mod:`paceline.elastic.commit.kept`, sent to ranks that copy by
:mod:`paceline.elastic.state`. Must not know how a hook compresses.

[Note: what belongs to a rank]
Most of a state is the same on all ranks. What compression has left out of a rank's gradients (error
feedback, residuals, local momentum) is not: it is that rank's own, and is never sent.

- A survivor that stands at the committed step keeps its own, as it was at the commit.
- A rank that is told to take another's state begins with none: a joiner has nothing, and what a
  rank that is one step behind has left out may have been sent already in the step that it misses.
- A rank whose optimizer has stepped already, and whose step turns out to be committed elsewhere,
  keeps what it has; if the step does not count after all, it goes back.

So a death costs what compression had left out on the rank that died: one rank's errors of one step.
A run in which a rank was replaced has the same bits on all ranks, but with such a hook not those of
an undisturbed run.

A state that is not ours is treated as the same on all ranks, if it has ``state_dict`` and
``load_state_dict``; without those it is not kept, and a log line says so.
"""

from __future__ import annotations

import copy
import enum
import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from paceline.ddp import DistributedDataParallel
from paceline.hooks.state import HookState

logger = logging.getLogger("paceline.elastic")


class Feedback(enum.Enum):
    """What becomes of a rank's own part of a hook's state when it takes another rank's state."""

    KEEP = "keep"
    """It belongs to the step that is taken."""

    ROLL_BACK = "roll back"
    """The step that changed it does not count."""

    FORGET = "forget"
    """There is none, or nobody knows which step it belongs to."""


class WrapperState:
    """The memory of some wrappers.

    Args:
        wrappers: Paceline's.
    """

    def __init__(self, wrappers: Sequence[DistributedDataParallel]) -> None:
        self._reducers = [each.reducer for each in wrappers if each.reducer is not None]
        # Looked up once: they stay when ranks change.
        self._counted = [
            (each.counters, each.runner.weighted_mean, each.registered) for each in self._reducers
        ]
        self._sharded = [each for each in wrappers if each._shard_rounds is not None]
        self._warned: set[int] = set()
        self._numbers: list[tuple[int, float]] = []
        self._rounds: list[int] = []
        self._hooks: list[Any] = []

    def keep(self) -> None:
        """Keep all of it as it is now; copies no large tensor of our own hooks."""
        self._numbers, has_hook = [], False
        for counters, mean, registered in self._counted:
            self._numbers.append((counters.skipped_steps, mean.unit))
            has_hook |= registered.hook is not None
        self._rounds = self._read_rounds() if self._sharded else []
        self._hooks = [_kept(state) for state in self._states()] if has_hook else []

    def put_back(self) -> None:
        """Make all of it as it was at the commit."""
        self._write_numbers(self._numbers)
        self._write_rounds(self._rounds)
        for state, kept in zip(self._states(), self._hooks, strict=False):
            if isinstance(state, HookState):
                state.roll_back()
            elif kept is not None:
                state.load_state_dict(copy.deepcopy(kept))

    def tree(self) -> dict[str, Any]:
        """Return what is the same on all ranks."""
        return {
            "numbers": self._read_numbers(),
            "rounds": self._read_rounds(),
            "hooks": [_shared(s) for s in self._states()],
        }

    def take(self, tree: dict[str, Any], feedback: Feedback) -> None:
        """Take what another rank's :meth:`tree` gave."""
        self._write_numbers(tree["numbers"])
        self._write_rounds(tree["rounds"])
        for state, shared in zip(self._states(), tree["hooks"], strict=True):
            if isinstance(state, HookState):
                if feedback is Feedback.FORGET:
                    state.forget_feedback()
                elif feedback is Feedback.ROLL_BACK:
                    state.roll_back()
                state.load_shared_state(shared)
            elif shared is not None:
                state.load_state_dict(shared)

    def _states(self) -> list[Any]:
        """The states of all hooks: None where there is nothing to keep."""
        hooks = [reducer.registered.hook for reducer in self._reducers]
        return [None if hook is None else self._checked(hook.name, hook.state) for hook in hooks]

    def _checked(self, name: str, state: Any) -> Any:
        if state is None or isinstance(state, dist.ProcessGroup) or _has_state(state):
            return state
        if id(state) not in self._warned:
            self._warned.add(id(state))
            logger.warning(
                "the state of the communication hook %s (%s) has no state_dict and "
                "load_state_dict: it is neither put back after a failed step nor sent to ranks "
                "that join. Add them, or use one of paceline.hooks.",
                name,
                type(state).__name__,
            )
        return None

    def _read_rounds(self) -> list[int]:
        """Where the random streams of shards begin."""
        return [each.shard_round for each in self._sharded]

    def _write_rounds(self, rounds: Sequence[int]) -> None:
        for wrapper, number in zip(self._sharded, rounds, strict=False):
            wrapper.shard_round = number

    def _read_numbers(self) -> list[tuple[int, float]]:
        return [(counters.skipped_steps, mean.unit) for counters, mean, _ in self._counted]

    def _write_numbers(self, numbers: Sequence[Sequence[float]]) -> None:
        for (counters, mean, _), (skipped, unit) in zip(self._counted, numbers, strict=False):
            counters.skipped_steps = int(skipped)
            mean.unit = float(unit)


def _has_state(state: Any) -> bool:
    return hasattr(state, "state_dict") and hasattr(state, "load_state_dict")


def _kept(state: Any) -> Any:
    if isinstance(state, HookState):
        state.mark()
        return None
    return copy.deepcopy(state.state_dict()) if _has_state(state) else None


def _shared(state: Any) -> Any:
    if isinstance(state, HookState):
        return state.shared_state()
    return state.state_dict() if _has_state(state) else None
