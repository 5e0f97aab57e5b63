"""Local SGD: ranks step on their own gradients and meet every so many steps.

Two forms. Post-local SGD, under torch's names: gradients are averaged over all ranks at first, then
over the ranks of a host, and parameters over all ranks by an averager. DiLoCo (Douillard et al.,
arXiv:2311.08105): after H steps, the mean of how far the ranks have gone is a gradient for an outer
Nesterov step. With ``outer_lr=1, outer_momentum=0``, DiLoCo is plain local SGD.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from paceline.errors import ConfigurationError
from paceline.hooks.averagers import ModelAverager
from paceline.hooks.interface import HookBucket, TensorFuture, comm_hook, done, group_of
from paceline.hooks.step_undo import StepUndo
from paceline.hooks.uncompressed import mean_future


class CountedState:
    """A hook's state that knows in which step it is."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group
        self.iter = 0

    def maybe_increase_iter(self, bucket: HookBucket) -> None:
        """Count a step when its last bucket is there."""
        self.iter += bucket.is_last()

    def change_group(self, group: dist.ProcessGroup) -> None:
        """Go on with other ranks; who has named no group takes the default one anyway."""
        if self.process_group is not None:
            self.process_group = group

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"iter": self.iter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self.iter = int(state["iter"])

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without groups."""
        kept = self.__dict__.items()
        return {k: None if isinstance(v, dist.ProcessGroup) else v for k, v in kept}


class PostLocalSGDState(CountedState):
    """Settings of :func:`post_localSGD_hook`.

    Args:
        process_group: All ranks; None is the default group.
        subgroup: The ranks among which gradients are averaged later; None is this host's, as many
            as torchrun's LOCAL_WORLD_SIZE says.
        start_localSGD_iter: Until this step, gradients are averaged over all ranks.
        post_local_gradient_allreduce: False: from then on, each rank keeps its own gradients.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        super().__init__(process_group)
        self.subgroup = subgroup
        self._is_own_subgroup = subgroup is None
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce

    def change_group(self, group: dist.ProcessGroup) -> None:
        """Go on with other ranks.

        Raises:
            ConfigurationError: The subgroup was yours, and its ranks are not there any more.
        """
        super().change_group(group)
        if not self._is_own_subgroup:
            raise ConfigurationError(
                "post_localSGD_hook: the ranks have changed, and the subgroup that was passed "
                "cannot be made again here. Pass subgroup=None: then the ranks of each host are "
                "found again after every change."
            )
        self.subgroup = None


@comm_hook
def post_localSGD_hook(state: PostLocalSGDState, bucket: HookBucket) -> TensorFuture:
    """Average over all ranks at first, then over the subgroup. Parameters are yours to average."""
    buffer = bucket.buffer()
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return mean_future(group_of(state.process_group), buffer)
    if not state.post_local_gradient_allreduce:
        return done(buffer)
    if state.subgroup is None:
        state.subgroup = _ranks_of_this_host(state.process_group)
    return mean_future(state.subgroup, buffer)


def _ranks_of_this_host(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    size = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not size.isdigit():
        raise ConfigurationError(
            "post_localSGD_hook: subgroup is None, and LOCAL_WORLD_SIZE does not say how many "
            "ranks share a host. Start the ranks with torchrun, or pass a subgroup: "
            "dist.new_subgroups(group_size=...)[0]."
        )
    mine: dist.ProcessGroup
    mine, _ = dist.new_subgroups(group_size=int(size), group=process_group)
    return mine


class WrappingOptimizer(Optimizer):
    """An optimizer around another one, which has the parameters and the state.

    Attributes:
        undoes_failed_steps: A step in which ranks meet, and fail, is undone as a whole.
        was_undone: That has happened; for whoever goes on to set it back.
    """

    def __init__(self, optim: Optimizer) -> None:
        # Not Optimizer.__init__: parameters and state are the inner optimizer's.
        self.optim = optim
        self.param_groups = optim.param_groups
        self.undoes_failed_steps = self.was_undone = False

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's; some schedulers look at them."""
        return self.optim.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients."""
        self.optim.zero_grad(set_to_none=set_to_none)


@contextlib.contextmanager
def undone_if_failed(optimizer: WrappingOptimizer, undo: StepUndo | None) -> Iterator[None]:
    """Undo a step in which ranks meet, if it fails."""
    try:
        yield
    except BaseException:
        if undo is not None:
            undo.restore()
            optimizer.was_undone = True
        raise


class PostLocalSGDOptimizer(WrappingOptimizer):
    """An optimizer that averages parameters after its step, when the averager says so.

    Args:
        optim: Does the local step.
        averager: Decides when to average, and over whom.
    """

    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        super().__init__(optim)
        self.averager = averager

    def __repr__(self) -> str:
        """Show the inner optimizer."""
        return repr(self.optim)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's, with the averager's ``step``."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both; without a ``step`` the averager begins at 0, with a warning."""
        self.optim.load_state_dict(state_dict)
        self.param_groups = self.optim.param_groups
        if "step" not in state_dict:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step "
                "counter to 0, warm-up included. Was it saved by another optimizer?",
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step, then average if it is time."""
        is_undoable = self.undoes_failed_steps and self.averager.is_due()
        undo = StepUndo(self.optim) if is_undoable else None
        with undone_if_failed(self, undo):
            loss = self.optim.step() if closure is None else self.optim.step(closure)
            self.averager.average_parameters(params=self.param_groups)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the inner optimizer."""
        self.optim.add_param_group(param_group)
