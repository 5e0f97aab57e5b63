"""Averaging of parameters instead of gradients, every so many steps.

Used after ``optimizer.step()``, by hand or through :class:`PostLocalSGDOptimizer`, together with
:func:`paceline.hooks.post_localSGD_hook`. Names and arguments are torch's.
"""

from __future__ import annotations

import abc
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import ConfigurationError
from paceline.hooks.interface import group_of
from paceline.liveness import watch_of
from paceline.torch_private.groups import is_outside_group

Parameters = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]

_EVERY_STEP = (
    "no need to use model averaging: it sends as much as averaging gradients does. Use "
    "DistributedDataParallel without a hook, or a longer period."
)


class ModelAverager(abc.ABC):
    """Counts steps and decides when to average.

    Args:
        process_group: Whose parameters are averaged; None is the default group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        group_of(process_group)  # raises, if there is none
        self._given = process_group
        self.step = 0

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Whose parameters are averaged; the default group as it is now, unless one was given."""
        return group_of(self._given)

    def is_due(self) -> bool:
        """Whether the next :meth:`average_parameters` may average: True if nobody knows."""
        return True

    @abc.abstractmethod
    def average_parameters(self, params: Parameters) -> None:
        """Count one step; average parameters, or those of an optimizer's groups, if it is time."""


class PeriodicModelAverager(ModelAverager):
    """Averages over one group.

    Args:
        period: In steps.
        warmup_steps: How many steps to leave out at first; as many as ``start_localSGD_iter``.
        process_group: Whose parameters are averaged; None is the default group.
    """

    def __init__(
        self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(process_group)
        _check_steps(period, warmup_steps)
        if period == 1:
            warnings.warn(f"When period is 1, {_EVERY_STEP}", stacklevel=2)
        self.period = period
        self.warmup_steps = warmup_steps

    def is_due(self) -> bool:
        """Whether the next :meth:`average_parameters` averages."""
        since = self.step - self.warmup_steps
        return since >= 0 and since % self.period == 0

    def average_parameters(self, params: Parameters) -> None:
        """Count one step, and average in every ``period``-th after the warm-up."""
        if self.is_due():
            average(params, self.process_group)
        self.step += 1


class HierarchicalModelAverager(ModelAverager):
    """Averages over small groups often and over large groups seldom (arXiv:2010.12998).

    Args:
        period_group_size_dict: Period in steps to group size, in growing order; the last group is
            all of ``process_group``. In a step that belongs to several, the largest averages.
        warmup_steps: How many steps to leave out at first.
        process_group: All ranks concerned; None is the default group.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        if not period_group_size_dict:
            raise ConfigurationError(
                "Arg ``period_group_size_dict`` must not be empty. Give periods and group sizes, "
                "for example {2: 4, 8: 16} for 16 ranks: four at a time every 2 steps, all every 8."
            )
        self._periods = list(period_group_size_dict)
        minimum = "The minimum period in arg ``period_group_size_dict``"
        _check_steps(min(self._periods), warmup_steps, minimum)
        if self._periods[-1] == 1:
            longest = "the maximum period in arg ``period_group_size_dict``"
            warnings.warn(f"When {longest} is 1, {_EVERY_STEP}", stacklevel=2)
        world = self.process_group.size()
        last = list(period_group_size_dict.values())[-1]
        if last != world:
            raise ConfigurationError(
                f"The last value in arg ``period_group_size_dict`` {last} must be equal to the "
                f"size of arg ``process_group`` {world}: the last group is all ranks."
            )
        self.period_process_group_dict = {
            period: self._groups_of(size) for period, size in period_group_size_dict.items()
        }
        self.warmup_steps = warmup_steps

    def average_parameters(self, params: Parameters) -> None:
        """Count one step, and average over the largest group whose period it is."""
        if self.step >= self.warmup_steps:
            group = self._find_process_group()
            if group is not None:
                average(params, group)
        self.step += 1

    def _find_process_group(self) -> dist.ProcessGroup | None:
        for period in reversed(self._periods):
            if self.step % period == 0:
                return self.period_process_group_dict[period]
        return None

    def _groups_of(self, size: int) -> dist.ProcessGroup:
        if size == self.process_group.size():
            return self.process_group
        mine: dist.ProcessGroup
        mine, _ = dist.new_subgroups(group_size=size, group=self.process_group)
        return mine


def average(params: Parameters, group: dist.ProcessGroup) -> None:
    """Replace parameters that have gradients by their mean over a group, in place."""
    if is_outside_group(group):
        return
    mean_of_all([parameter.detach() for parameter in _with_gradients(params)], group)


def mean_of_all(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace tensors by their mean over all ranks, one message for each dtype and device."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same]).div_(group.size())
        watch_of(group).run("averaging of parameters", partial(group.allreduce, [flat]))
        offset = 0
        for tensor in same:
            tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()


def _with_gradients(params: Parameters) -> Iterable[torch.nn.Parameter]:
    for item in params:
        if not isinstance(item, (torch.nn.Parameter, dict)):
            raise NotImplementedError(
                f"Parameter input of type {type(item)} is not supported: average_parameters takes "
                "parameters or an optimizer's param_groups. Pass model.parameters()."
            )
        for parameter in item["params"] if isinstance(item, dict) else [item]:
            if parameter.grad is not None:
                yield parameter


def _check_steps(period: int, warmup_steps: int, which: str = "Arg ``period``") -> None:
    if warmup_steps < 0:
        raise ConfigurationError(
            f"Arg ``warmup_steps`` must be a non-negative number. It is {warmup_steps!r}."
        )
    if period < 1:
        raise ConfigurationError(f"{which} must be a positive value. It is {period!r} steps.")
