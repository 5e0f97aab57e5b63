"""Top-k: only the largest gradients travel; the rest waits until it is large enough.

Each rank sends the k largest values of its residual (all gradients so far, less what was sent) with
their places; all ranks add up all of them. Nothing is lost, only late. Bytes are 8 per value sent,
times the number of ranks: for few ranks and small ratios.

With ``momentum``, as in deep gradient compression (Lin et al., arXiv:1712.01887): momentum is taken
on each rank before selection, so that late values do not miss it. The hook does then what the
optimizer's momentum did, and the optimizer must have none. Where everything is sent, that is SGD
with momentum exactly.

With ``momentum_masking``, also of that paper, momentum is forgotten where a value was sent, against
directions that are out of date. It costs length: momentum m, begun anew, takes some 1 / (1 - m)
steps to grow to what it was, so a value that is sent every T steps goes less far by about
1 / (T (1 - m)). With one in a thousand sent that is 1 %, with one in four it is most of the step.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from paceline.errors import ConfigurationError
from paceline.hooks.interface import (
    HookBucket,
    TensorFuture,
    comm_hook,
    start_all_gather,
    start_all_reduce,
)
from paceline.hooks.layout import BucketView
from paceline.hooks.round_scheduler import Rounds
from paceline.hooks.state import HookState

RESIDUAL, VELOCITY = "residual", "velocity"

_EXACT_BELOW = 1 << 14  # so small that a sample is not worth it
_SAMPLE = 1 << 14
_CHUNK = 1 << 16
_SLACK = 1.25  # how many times k a threshold is aimed at


class TopKState(HookState):
    """Settings and memory of :func:`topk_hook`.

    Args:
        process_group: What to reduce over; None is the default group.
        ratio: The part of a bucket that each rank sends, above 0 and at most 1.
        momentum: Of the correction; 0 is plain error feedback. Use SGD without momentum with it.
        momentum_masking: Forget momentum where a value was sent. For ratios of 0.001 and less; with
            larger ones steps become shorter, and the learning rate has to make up for it.
        warmup_steps: In how many steps the ratio goes down from ``warmup_ratio`` to ``ratio``.
        warmup_ratio: Where it begins.

    Raises:
        ConfigurationError: A setting is wrong.
    """

    ROUNDS = 1
    NAME = "topk_hook"

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        ratio: float = 0.01,
        momentum: float = 0.0,
        momentum_masking: bool = False,
        warmup_steps: int = 0,
        warmup_ratio: float = 0.25,
    ) -> None:
        super().__init__(process_group)
        for name, value in (("ratio", ratio), ("warmup_ratio", warmup_ratio)):
            if not 0.0 < value <= 1.0:
                raise ConfigurationError(f"{name} is above 0 and at most 1, not {value!r}")
        if not 0.0 <= momentum < 1.0:
            raise ConfigurationError(f"momentum is at least 0 and below 1, not {momentum!r}")
        if momentum_masking and not momentum:
            raise ConfigurationError("momentum_masking=True needs a momentum above 0 to mask")
        if warmup_steps < 0:
            raise ConfigurationError(f"warmup_steps is not negative, but it is {warmup_steps!r}")
        self.ratio = ratio
        self.momentum = momentum
        self.momentum_masking = momentum_masking
        self.warmup_steps = warmup_steps
        self.warmup_ratio = warmup_ratio

    def ratio_at(self, step: int) -> float:
        """The ratio of a step: in the warm-up it shrinks by the same factor in every step."""
        if step >= self.warmup_steps:
            return self.ratio
        progress = (step + 1) / (self.warmup_steps + 1)
        return float(self.warmup_ratio * (self.ratio / self.warmup_ratio) ** progress)

    def rounds(self, view: BucketView, step: int) -> Rounds:
        """See the module's docstring."""
        world = self.group.size()
        residual = self._accumulate(view)
        k = max(1, math.ceil(self.ratio_at(step) * view.numel))
        if k * world >= view.numel:  # all of it is fewer bytes than so many parts
            yield from self._send_all(view, residual, world)
            return view.values
        places = largest(residual, k)
        sent = residual[places].to(view.values.dtype)
        residual[places] -= sent
        if self.momentum_masking:
            self.memory.get(view, VELOCITY)[places] = 0.0
        self._forget_nonfinite(view, residual)
        message = torch.cat([places.to(torch.int32).view(torch.uint8), sent.view(torch.uint8)])
        everybody = message.new_empty(world, message.numel())
        yield lambda group: start_all_gather(everybody, message, group)
        total = view.values if sent.dtype == residual.dtype else torch.empty_like(residual)
        total.zero_()
        for row in everybody:
            where = row[: 4 * k].clone().view(torch.int32)
            values = row[4 * k :].clone().view(sent.dtype).to(total.dtype)
            total.index_add_(0, where, values.div_(world))
        if total is not view.values:
            view.values.copy_(total)
        return view.values

    def _accumulate(self, view: BucketView) -> torch.Tensor:
        residual = self.memory.get(view, RESIDUAL)
        if not self.momentum:
            return residual.add_(view.values)
        velocity = self.memory.get(view, VELOCITY).mul_(self.momentum).add_(view.values)
        return residual.add_(velocity)

    def _send_all(self, view: BucketView, residual: torch.Tensor, world: int) -> Rounds:
        view.values.copy_(residual)
        residual.sub_(view.values)
        # Nothing is late, so there is no momentum to mask.
        self._forget_nonfinite(view, residual)
        view.values.div_(world)
        yield lambda group: start_all_reduce(view.values, group)
        return view.values

    def _forget_nonfinite(self, view: BucketView, residual: torch.Tensor) -> None:
        """Clear what is no number: it would stay so for ever."""
        memories = [residual]
        if self.momentum:
            memories.append(self.memory.get(view, VELOCITY))
        for memory in memories:
            if not torch.isfinite(memory.sum()):
                memory[~torch.isfinite(memory)] = 0.0


@comm_hook
def topk_hook(state: TopKState, bucket: HookBucket) -> TensorFuture:
    """Reduce the largest values of a bucket."""
    return state.run(bucket)


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return the places of the k largest magnitudes, in no order; NaN counts as largest.

    A threshold from a sample leaves few candidates, and the exact selection is made among those:
    ten times faster than a selection among all.
    """
    if not torch.isfinite(values.sum()):
        return _exact(values.abs().nan_to_num_(nan=math.inf, posinf=math.inf), k)
    if values.numel() > _EXACT_BELOW:
        candidates = _at_least(values, _threshold(values, k))
        if k <= candidates.numel() <= values.numel() // 2:
            return candidates[_exact(values[candidates].abs(), k)]
    return _exact(values.abs(), k)


def _at_least(values: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Return the places of magnitudes from a threshold on, part by part, in the cache."""
    places = [
        part.abs().ge(threshold).nonzero().view(-1).add_(number * _CHUNK)
        for number, part in enumerate(values.split(_CHUNK))
    ]
    return torch.cat(places)


def _threshold(values: torch.Tensor, k: int) -> torch.Tensor:
    sample = values[:: max(1, values.numel() // _SAMPLE)].abs()
    wanted = _SLACK * k / values.numel() * sample.numel()
    # Room for the sample's own spread.
    count = min(sample.numel(), math.ceil(wanted + 3 * math.sqrt(wanted)))
    return sample.topk(count, sorted=False).values.min()


def _exact(magnitudes: torch.Tensor, k: int) -> torch.Tensor:
    return magnitudes.topk(k, sorted=False).indices
