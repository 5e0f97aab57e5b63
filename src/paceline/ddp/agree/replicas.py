"""Do all ranks hold the same parameters? Asked every ``check_every`` steps.

Owned by a reducer; the wrapper's forward has it look (:mod:`paceline.ddp.forward_pass`), the step
runner sends what it saw in the control block, and :mod:`paceline.ddp.agree.peers` has it compare.

[Note: when replicas are equal]
Between an optimizer step and the next, parameters are the same on all ranks, or training is wrong.
They are looked at when a synchronised forward begins: before mixed precision exchanges them, and
before an optimizer in the backward changes them. Buffers are equal at one instant only: right after
rank 0's have been broadcast, for BatchNorm changes them in the forward. They are looked at there.
Where nothing broadcasts them, or a buffer hook does as it likes, they are each rank's own and not
compared. A rank that has joined has nothing to compare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch

from paceline.ddp.agree.checksum import checksums, combine
from paceline.ddp.agree.control import ControlBlock
from paceline.errors import ReplicasDifferError
from paceline.printable import listed

if TYPE_CHECKING:
    from paceline.ddp.wrapper import DistributedDataParallel

Gather = Callable[[Any], list[Any]]

_NAMED = 5  # tensors of a rank that the error lists


class ReplicaCheck:
    """Compares the replicas of one module.

    Args:
        module: The user's.
        ignored: Names of parameters and buffers that the wrapper leaves alone.
        every: Steps from one check to the next.
    """

    def __init__(self, module: torch.nn.Module, ignored: Collection[str], every: int) -> None:
        self._module = module
        self._ignored = ignored
        self._every = every
        self._step = -1
        self._seen: dict[str, int] = {}

    def is_due(self, step: int) -> bool:
        """Whether a step is one of those that are checked; all ranks count alike."""
        return step % self._every == 0

    def look(self, step: int, *, with_buffers: bool) -> None:
        """A forward begins that will be synchronised, as step ``step``."""
        named = dict(self._named(with_buffers=with_buffers))
        self._seen = dict(zip(named, checksums(list(named.values())), strict=True))
        self._step = step

    def digest(self, step: int) -> int:
        """Return what stands for all that was seen in this step; 0 if nothing was."""
        return combine(self._seen.values()) if self._step == step else 0

    def _named(self, *, with_buffers: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._module.named_parameters():
            if name not in self._ignored and not parameter.is_meta:
                yield name, parameter
        for name, buffer in self._module.named_buffers() if with_buffers else ():
            if name not in self._ignored and not buffer.is_meta:
                yield name, buffer

    def check(self, block: ControlBlock, gather: Gather) -> None:
        """Compare digests; if they differ, find out which tensors do. Collective only then.

        Raises:
            ReplicasDifferError: On every rank.
        """
        digests = {row.digest for _, row in block.present() if row.digest}
        if len(digests) < 2:
            return
        step = max(row.step for _, row in block.present())
        mine = {name: f"{value:x}" for name, value in self._seen.items()}
        told = gather(mine if self._step == step else None)
        seen = {rank: told[rank] for rank, _ in block.present() if told[rank]}
        odd = _find_odd(seen)
        if odd:
            raise _error(odd, len(seen), step)


def make_replica_check(ddp: DistributedDataParallel) -> ReplicaCheck | None:
    """Return the check that ``check_every`` asks for, if it does."""
    every = ddp._settings.policy.check_every
    return ReplicaCheck(ddp.module, ddp.parameters_to_ignore, every) if every else None


def _find_odd(seen: dict[int, dict[str, str]]) -> dict[int, list[str]]:
    """Say which ranks differ in what from most of the others.

    Where there is no majority, the lowest rank is taken to be right: it is the one that a new
    wrapper copies to all.
    """
    odd: dict[int, list[str]] = {}
    for name in next(iter(seen.values()), {}):
        values = {rank: tensors[name] for rank, tensors in seen.items() if name in tensors}
        if len(set(values.values())) > 1:
            usual = Counter(values.values()).most_common(1)[0][0]
            for rank, value in values.items():
                if value != usual:
                    odd.setdefault(rank, []).append(name)
    return dict(sorted(odd.items()))


def _error(odd: dict[int, list[str]], ranks: int, step: int) -> ReplicasDifferError:
    told = "\n".join(f"  rank {rank}: {listed(names, _NAMED)}" for rank, names in odd.items())
    first, names = next(iter(odd.items()))
    than = "rank 0" if ranks == 2 else "most ranks"
    return ReplicasDifferError(
        f"Replicas differ: at the beginning of step {step} some ranks held other values than "
        f"{than}.\n"
        f"{told}\n"
        "Something changed them on these ranks alone: a checkpoint loaded on one rank, an "
        "initialisation or a clipping with random numbers, an optimizer with other settings or "
        "another state, a write past the optimizer, or memory that is broken. Start from the "
        "latest checkpoint, or wrap the module in a new DistributedDataParallel, which gives all "
        "ranks the values of rank 0. No rank has applied this step's gradients.",
        rank=first,
        parameters=names,
    )
