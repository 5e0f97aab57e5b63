"""DiLoCo: a hook that keeps gradients local, and an optimizer that brings ranks together.

    state = hooks.DiLoCoState(start_step=100)
    ddp.register_comm_hook(state, hooks.diloco_hook)
    optimizer = hooks.DiLoCoOptimizer(AdamW(ddp.parameters()), period=50, start_step=100)

What is sent: in every ``period`` steps, each parameter once, in its own dtype. Between two
meetings, ranks have different parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from paceline.errors import ConfigurationError
from paceline.hooks.averagers import mean_of_all
from paceline.hooks.interface import HookBucket, TensorFuture, comm_hook, done, group_of
from paceline.hooks.local_sgd import CountedState, WrappingOptimizer, undone_if_failed
from paceline.hooks.step_undo import StepUndo
from paceline.hooks.uncompressed import mean_future

OUTER = "diloco"


class DiLoCoState(CountedState):
    """Settings of :func:`diloco_hook`.

    Args:
        process_group: What to reduce over before ``start_step``; None is the default group.
        start_step: Steps before this one average gradients as usual.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, *, start_step: int = 0
    ) -> None:
        super().__init__(process_group)
        self.start_step = start_step


@comm_hook
def diloco_hook(state: DiLoCoState, bucket: HookBucket) -> TensorFuture:
    """Average gradients before ``start_step``; from then on leave them as they are."""
    buffer = bucket.buffer()
    is_local = state.iter >= state.start_step
    state.maybe_increase_iter(bucket)
    return done(buffer) if is_local else mean_future(group_of(state.process_group), buffer)


class DiLoCoOptimizer(WrappingOptimizer):
    """Local steps, and every ``period`` steps an outer step that all ranks take together.

    Args:
        optim: Does the local steps; its state stays local.
        period: H, how many local steps lie between two meetings.
        outer_lr: How far to go along the mean of what the ranks have moved; 1 with
            ``outer_momentum=0`` is the mean of their parameters.
        outer_momentum: Of the outer Nesterov step; 0 is none.
        process_group: Who meets; None is the default group.
        start_step: As many steps as the hook still averages gradients in.

    Raises:
        ConfigurationError: A setting is wrong.
    """

    def __init__(
        self,
        optim: Optimizer,
        *,
        period: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        process_group: dist.ProcessGroup | None = None,
        start_step: int = 0,
    ) -> None:
        if type(period) is not int or period < 1:
            raise ConfigurationError(f"period is an int of at least 1 step, not {period!r}")
        if outer_lr <= 0 or not 0.0 <= outer_momentum < 1.0:
            raise ConfigurationError(
                "outer_lr is above 0, and outer_momentum at least 0 and below 1; they are "
                f"{outer_lr!r} and {outer_momentum!r}"
            )
        super().__init__(optim)
        self.period = period
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.process_group = process_group
        self.start_step = start_step
        self.steps = 0
        self._anchors = [parameter.detach().clone() for parameter in self._parameters()]
        self._velocities = [torch.zeros_like(anchor) for anchor in self._anchors]

    def __repr__(self) -> str:
        """Show the inner optimizer and the period."""
        return f"DiLoCoOptimizer(period={self.period}, {self.optim!r})"

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a local step, and the outer one when it is time."""
        since = self.steps + 1 - self.start_step
        is_meeting = since > 0 and since % self.period == 0
        undo = StepUndo(self.optim) if is_meeting and self.undoes_failed_steps else None
        with undone_if_failed(self, undo):
            loss = self.optim.step() if closure is None else self.optim.step(closure)
            if is_meeting:
                self._meet()
        self.steps += 1
        if since == 0:
            for anchor, parameter in zip(self._anchors, self._parameters(), strict=True):
                anchor.copy_(parameter.detach())
        return loss

    @torch.no_grad()
    def _meet(self) -> None:
        """Step all ranks from where they last met, along the mean of where they went."""
        group = group_of(self.process_group)
        parameters = list(self._parameters())
        moved = [a - p for a, p in zip(self._anchors, parameters, strict=True)]
        mean_of_all(moved, group)
        for anchor, velocity, delta, parameter in zip(
            self._anchors, self._velocities, moved, parameters, strict=True
        ):
            velocity.mul_(self.outer_momentum).add_(delta)
            delta.add_(velocity, alpha=self.outer_momentum)
            anchor.sub_(delta, alpha=self.outer_lr)
            parameter.copy_(anchor)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's, with where ranks last met, velocities and the step."""
        outer = {
            "steps": self.steps,
            "anchors": [anchor.clone() for anchor in self._anchors],
            "velocities": [velocity.clone() for velocity in self._velocities],
        }
        return {**self.optim.state_dict(), OUTER: outer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both.

        Raises:
            ConfigurationError: It was saved by another optimizer.
        """
        if OUTER not in state_dict:
            raise ConfigurationError(
                f"DiLoCoOptimizer.load_state_dict: there is no {OUTER!r} in what was saved. Load "
                "what a DiLoCoOptimizer has saved, or load it into the inner optimizer."
            )
        outer = state_dict[OUTER]
        self.optim.load_state_dict({k: v for k, v in state_dict.items() if k != OUTER})
        self.param_groups = self.optim.param_groups
        self.steps = int(outer["steps"])
        for mine, saved in (
            (self._anchors, outer["anchors"]),
            (self._velocities, outer["velocities"]),
        ):
            for tensor, value in zip(mine, saved, strict=True):
                tensor.copy_(value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: ranks would have to meet for parameters that have no common beginning."""
        raise ConfigurationError(
            "DiLoCoOptimizer cannot take further parameters. Add them to the inner optimizer and "
            "make a new DiLoCoOptimizer around it."
        )

    def _parameters(self) -> Iterable[torch.Tensor]:
        return (p for group in self.optim.param_groups for p in group["params"])
