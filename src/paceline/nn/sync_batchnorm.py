"""``SyncBatchNorm``: batch normalisation whose batch is that of all ranks, on CPU too.

The module: arguments, running statistics, conversion of other modules. The arithmetic and the
messages are in :mod:`paceline.nn.batch_stats`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.errors import NormInputError, UntrainableModuleError
from paceline.nn.batch_stats import BatchStats, NormalizeOverRanks, gather_stats, local_stats
from paceline.nn.exchange import Exchange
from paceline.nn.join_mirror import NormMirror
from paceline.torch_private.modules import (
    BatchNormBase,
    TorchSyncBatchNorm,
    knows_sync_batch_norm,
)
from paceline.types import ShardExchange


class SyncBatchNorm(TorchSyncBatchNorm):
    """Batch normalisation over the batches of all ranks.

    In training, outputs, gradients and running statistics are those of ``BatchNorm`` on the
    concatenated batch. Ranks may have different batch sizes, also none. One collective in forward
    and one in backward. Without a process group, with one rank, and in ``eval()`` it is
    ``BatchNorm``. Takes torch's arguments, and is one of torch's for ``isinstance``. On the devices
    that torch has kernels for, torch's are used.

    Example::

        model = paceline.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = paceline.DistributedDataParallel(model)
    """

    # Set inside of a join context only, by NormMirror.
    _exchange: Exchange | None = None
    # Set inside of a round over shards only, by the wrapper.
    over_shards: ShardExchange | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise a batch; every rank of the group must call it.

        Raises:
            NormInputError: If the input has fewer than two dimensions or no channels, or if all
                ranks together have one value per channel.
        """
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        if self.over_shards is not None and self.training:
            return self._normalize_over_ranks(input, self._count_batch(), self.over_shards)
        group = self._group_to_sync()
        if group is not None and knows_sync_batch_norm(input.device):
            return super().forward(input)
        momentum = self._count_batch()
        if group is None:
            return self._normalize_alone(input, momentum)
        return self._normalize_over_ranks(input, momentum, self._exchange or Exchange(group))

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise NormInputError(
                f"SyncBatchNorm expected at least 2D input (got {input.dim()}D input): batch and "
                f"channels, and this has the shape {tuple(input.shape)}. Add the batch dimension: "
                "input.unsqueeze(0)."
            )

    def _check_non_zero_input_channels(self, input: torch.Tensor) -> None:
        channels = input.size(1)
        has_channels = self.affine or self.track_running_stats
        if channels == 0 or (has_channels and channels != self.num_features):
            phrase = f"running_mean should contain {channels} elements not {self.num_features}"
            if channels == 0:
                phrase = "SyncBatchNorm number of input channels should be non-zero"
            raise NormInputError(
                f"{phrase}: the layer was made for {self.num_features} channels, and got an input "
                f"of shape {tuple(input.shape)}, whose dimension 1 has {channels}. Channels come "
                "second: permute the input, or make the layer for that number."
            )

    def _group_to_sync(self) -> dist.ProcessGroup | None:
        """Return the group, if there are other ranks whose values count."""
        if not self.training or not dist.is_available() or not dist.is_initialized():
            return None
        group: Any = self.process_group or dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None

    def _count_batch(self) -> float:
        """Count this batch; return how much its statistics weigh in the running ones."""
        if not (self.training and self.track_running_stats):
            return self.momentum or 0.0
        assert self.num_batches_tracked is not None
        if self._keeps_statistics():
            self.num_batches_tracked.add_(1)
        if self.momentum is None:
            return 1.0 / float(self.num_batches_tracked)
        return self.momentum

    def _keeps_statistics(self) -> bool:
        """All shards have the same statistics: the first one of a rank keeps them."""
        return self.over_shards is None or self.over_shards.is_first

    def _normalize_alone(self, input: torch.Tensor, momentum: float) -> torch.Tensor:
        uses_batch = self.training or self.running_mean is None
        tracked = self.track_running_stats or not self.training
        return F.batch_norm(
            input,
            self.running_mean if tracked else None,
            self.running_var if tracked else None,
            self.weight,
            self.bias,
            uses_batch,
            momentum,
            self.eps,
        )

    def _normalize_over_ranks(
        self, input: torch.Tensor, momentum: float, exchange: Exchange | ShardExchange
    ) -> torch.Tensor:
        with torch.no_grad(), torch.autocast(input.device.type, enabled=False):
            stats = gather_stats(local_stats(input), exchange)
            count = float(stats.total)
            self._check_count(count, input)
            if self.track_running_stats and count and self._keeps_statistics():
                self._update_running(stats, count, momentum)
        output: torch.Tensor = NormalizeOverRanks.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, stats, self.eps, exchange
        )
        return output

    def _check_count(self, count: float, input: torch.Tensor) -> None:
        """All ranks know the same count, so all raise."""
        if count == 1:
            raise NormInputError(
                "Expected more than 1 value per channel when training, over all ranks of a "
                f"SyncBatchNorm; this rank's input has the shape {tuple(input.shape)}. Use a "
                "larger batch, drop the last incomplete one, or call eval()."
            )

    def _update_running(self, stats: BatchStats, count: float, momentum: float) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        unbiased = stats.var * (count / (count - 1))
        for running, new in ((self.running_mean, stats.mean), (self.running_var, unbiased)):
            running.mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)

    @classmethod
    def mirror_for_join(cls, module: nn.Module) -> NormMirror:
        """Return what takes part in the messages of these layers for a rank without inputs.

        Called by every rank together, when a join context is made around a model.
        """
        return NormMirror(module, [m for m in module.modules() if isinstance(m, SyncBatchNorm)])

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> nn.Module:
        """Replace every ``BatchNorm*d`` in a module, in place, parameters and statistics kept.

        Args:
            module: If it is a ``BatchNorm*d`` itself, a new module is returned.
            process_group: Over which ranks to normalise; all by default.

        Raises:
            UntrainableModuleError: If a lazy one has not seen a batch yet.
        """
        return cls._convert(module, process_group, {})

    @classmethod
    def _convert(
        cls, module: nn.Module, group: dist.ProcessGroup | None, done: dict[int, nn.Module]
    ) -> nn.Module:
        if id(module) in done:  # one that is used in several places stays one
            return done[id(module)]
        made = cls._from_batchnorm(module, group) if isinstance(module, BatchNormBase) else module
        done[id(module)] = made
        for name, child in list(module.named_children()):
            made.add_module(name, cls._convert(child, group, done))
        return made

    @classmethod
    def _from_batchnorm(cls, norm: Any, group: dist.ProcessGroup | None) -> nn.Module:
        if any(is_lazy(tensor) for tensor in (*norm.parameters(), *norm.buffers())):
            raise UntrainableModuleError(
                f"{type(norm).__name__} has not seen a batch yet, so its channels are not known. "
                "Run one batch through the model first."
            )
        made = cls(
            norm.num_features,
            norm.eps,
            norm.momentum,
            norm.affine,
            norm.track_running_stats,
            group,
            bias=norm.bias is not None,
        )
        made.weight, made.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(made, name, getattr(norm, name))
        made.training = norm.training
        if hasattr(norm, "qconfig"):
            made.qconfig = norm.qconfig
        return made
