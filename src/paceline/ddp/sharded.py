"""What a wrapper with ``shards`` offers its users, and what it cannot be combined with.

A base of :class:`paceline.ddp.wrapper.DistributedDataParallel`. The loop itself is in
:mod:`paceline.ddp.features.shard_rounds`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from paceline import hooks
from paceline.config import Shards
from paceline.ddp.features.buffers import BufferSync
from paceline.ddp.features.shard_buffers import ShardBuffers
from paceline.ddp.features.shard_errors import refuses_nondeterminism
from paceline.ddp.features.shard_meeting import ShardMeeting
from paceline.ddp.features.shard_parameters import ParameterWatch
from paceline.ddp.features.shard_record import ShardRecord
from paceline.ddp.features.shard_rounds import ShardRounds
from paceline.ddp.reduce.reducer import Reducer
from paceline.ddp.reduce.shard_sums import ShardSums
from paceline.ddp.without_shards import CONSTRUCTOR_ARGUMENTS, excludes_shards
from paceline.errors import ArgumentTypeError, ConfigurationError
from paceline.shards.tree import Shares
from paceline.torch_private.modules import TorchDDP, TorchSyncBatchNorm

T = TypeVar("T")


class ShardedTraining:
    """The part of a wrapper that runs shards.

    Attributes:
        _shard_rounds: None without ``shards``.
    """

    _shard_rounds: ShardRounds | None
    process_group: Any
    module: Any
    reducer: Reducer | None
    _buffer_sync: BufferSync
    parameters_to_ignore: set[str]

    def _make_shard_sums(self, shards: Shards | None) -> ShardSums | None:
        """Make what the reducer needs to know of shards."""
        if shards is None:
            return None
        pin_process(shards)
        return ShardSums(shards, self.process_group.rank(), self.process_group.size())

    def _make_shard_rounds(self, sums: ShardSums | None) -> None:
        """Make the loop over shards, once there is a reducer."""
        self._shard_rounds = None
        if sums is not None and self.reducer is not None:
            self._shard_rounds = ShardRounds(
                sums,
                self.reducer,
                ShardBuffers(self._buffer_sync),
                ShardRecord(self.module, sums.policy),
                ShardMeeting(self.module),
                ParameterWatch(self._watched_parameters()),
            )

    def _watched_parameters(self) -> dict[str, torch.Tensor]:
        named = self.module.named_parameters()
        return {name: each for name, each in named if name not in self.parameters_to_ignore}

    def run_shards(self, batch: Any, function: Callable[[Any], T]) -> list[T]:
        """Run a function for each shard of this rank; the gradients are those of all shards.

        The same as the loop ``for micro in ddp.shards(batch): function(micro)``, and needed for
        models with ``paceline.nn.SyncBatchNorm``, which normalises over all shards: they run in
        turns then, on threads of their own, each up to the next of these layers::

            def train_shard(micro):
                inputs, targets = micro
                loss(ddp(inputs), targets).backward()

            ddp.run_shards(batch, train_shard)
            optimizer.step()

        Args:
            batch: As of :meth:`shards`.
            function: Runs one forward and one backward. Only one runs at a time.

        Returns:
            What the function has returned for each shard.
        """
        return self._rounds("run_shards()").run_all(self, batch, function)  # type: ignore[arg-type]

    def shards(self, batch: Any) -> Iterator[Any]:
        """Yield a micro-batch for each shard of this rank; the gradients are those of all shards.

        Each is one forward and one backward. Afterwards gradients are the mean over the shards of
        all ranks, with the same bits at any number of ranks, and are added to what was there::

            ddp = DDP(model, shards=8)
            for inputs, targets in ddp.shards(batch):
                loss(ddp(inputs), targets).backward()
            optimizer.step()

        Args:
            batch: What :class:`paceline.ShardLoader` yields; or tensors, numpy arrays and lists
                with one entry for each sample, also in tuples, lists, dicts, dataclasses and
                registered types, with the samples of this rank's shards one after the other.
        """
        yield from self._rounds("shards()").run(self, batch)  # type: ignore[arg-type]

    @property
    def shard_round(self) -> int:
        """How many loops over shards are complete: save it, and set it when you go on from there.

        Random streams begin with it.
        """
        return self._rounds("shard_round").round

    @shard_round.setter
    def shard_round(self, value: int) -> None:
        self._rounds("shard_round").round = int(value)

    @property
    def shard_shares(self) -> Shares:
        """Which shards each rank runs now."""
        return self._rounds("shard_shares").shares

    def _rounds(self, what: str) -> ShardRounds:
        if self._shard_rounds is None:
            raise ConfigurationError(
                f"{what} needs a wrapper with shards: DistributedDataParallel(module, shards=8)."
            )
        return self._shard_rounds

    def _casts_shards(self, state: object, hook: object) -> bool:
        """Take over a hook that only casts: it is applied to every shard and every sum.

        Raises:
            ConfigurationError: If there are shards, and it is another hook.
        """
        # By identity: what is no hook at all may not be hashable, and is named later.
        dtype = next((dtype for cast, dtype in _CASTS.items() if cast is hook), None)
        if self._shard_rounds is None or dtype is None:
            return False
        if state is not None and state is not self.process_group:
            raise ConfigurationError(
                "With shards a hook that casts reduces over the wrapper's own group: register it "
                "with None as its state."
            )
        self._shard_rounds.cast_to(dtype)
        return True

    def _refuse_with_shards(self, what: str) -> None:
        """Raise if this wrapper runs shards."""
        if self._shard_rounds is not None:
            raise excludes_shards(what)


_CASTS: dict[object, torch.dtype] = {
    hooks.fp16_compress_hook: torch.float16,
    hooks.bf16_compress_hook: torch.bfloat16,
}


def choose_shards(shards: Any, others: dict[str, Any]) -> Shards | None:
    """Check the argument, and what cannot be combined with it.

    Args:
        shards: None, a number, or :class:`paceline.Shards`.
        others: Arguments of the wrapper by name.

    Raises:
        ConfigurationError: If it does not fit.
    """
    if shards is None:
        return None
    if isinstance(shards, int) and not isinstance(shards, bool):
        shards = Shards(shards)
    if not isinstance(shards, Shards):
        raise ArgumentTypeError(
            f"shards is a number or paceline.Shards, not {shards!r}. Write for example shards=8."
        )
    for name in CONSTRUCTOR_ARGUMENTS:
        if others.get(name):
            raise excludes_shards(name)
    _check_module(others["module"])
    return shards


def _check_module(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, TorchSyncBatchNorm):
            _check_norm(name or "the module", part)
        if isinstance(part, TorchDDP):
            raise ConfigurationError(
                f"{name} is a wrapper inside of a wrapper with shards, and would average in the "
                "order of ranks. Wrap the whole model once."
            )
    if any(hasattr(p, "_in_backward_optimizers") for p in module.parameters()):
        raise ConfigurationError(
            "An optimizer that steps in the backward and shards exclude each other: gradients are "
            "complete only after the last shard."
        )


def _check_norm(name: str, norm: Any) -> None:
    if not hasattr(norm, "over_shards"):
        raise ConfigurationError(
            f"{name} is torch's SyncBatchNorm, which knows no shards. Take "
            "paceline.nn.SyncBatchNorm.convert_sync_batchnorm(module)."
        )
    if norm.process_group is not None:
        raise ConfigurationError(
            f"{name} is a SyncBatchNorm with a process_group, but with shards it normalises over "
            "all shards. Leave process_group out."
        )
    if any(p.device.type != "cpu" for p in (*norm.parameters(), *norm.buffers())):
        raise ConfigurationError(
            f"{name} is a SyncBatchNorm on an accelerator, whose backward passes run on one "
            "thread: shards cannot wait for each other there. Use BatchNorm: each shard has its "
            "own statistics, the same at any number of ranks."
        )


def pin_process(shards: Shards) -> None:
    """Set what the bits of kernels depend on, for the whole process."""
    found = torch.get_num_threads()
    if found != shards.threads:
        torch.set_num_threads(shards.threads)
        warnings.warn(
            f"shards: torch used {found} threads and uses {shards.threads} from now on, in the "
            "whole process, because kernels change their bits with it. Say "
            "torch.set_num_threads(n) before, and shards=paceline.Shards(count, threads=n) in all "
            "runs that are to be compared, to choose another number.",
            stacklevel=4,
        )
    if shards.deterministic and not refuses_nondeterminism():
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
