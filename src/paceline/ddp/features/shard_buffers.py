"""Buffers that a forward changes, such as BatchNorm's statistics: one set for each shard.

Every shard begins with the buffers of the last round. Afterwards a floating-point buffer is the
mean of what the shards have made of it, added up by the tree of the gradients; an integer one is
the largest. A buffer that no shard has changed stays as it is. Owned by the loop over shards.

[Note: which buffers travel]
Those that some shard of some rank has changed in this round: flags say which, so all ranks know the
same ones. The others are not touched: the mean of equal values need not be that value.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from paceline.ddp.features.buffers import BufferSync
from paceline.shards.sums import Gradients, PartStack
from paceline.shards.tree import Shares
from paceline.shards.tree_sum import start_tree_sum
from paceline.torch_private.autograd import preserve_versions

Changed = dict[str, torch.Tensor]
"""Buffers by name, as a shard has made them."""


class ShardBuffers:
    """The buffers of one module in one round after the other."""

    def __init__(self, sync: BufferSync) -> None:
        self._sync = sync

    def open(self, shares: Shares, without: Collection[str] = ()) -> None:
        """Begin a round: what is there now is where every shard begins.

        Those ``without`` are the same for all shards anyway.
        """
        if self._sync.named:
            self._sync.refresh()
        self._shares = shares
        self._named = {n: buffer for n, buffer in self._sync.named.items() if n not in without}
        self._base = {name: buffer.clone() for name, buffer in self._named.items()}
        self._found: list[Changed] = []

    def take(self) -> None:
        """A shard has run: keep what it has changed, and put the buffers back."""
        self.add(self.lift())

    def add(self, changed: Changed) -> None:
        """Keep what the next shard has changed."""
        self._found.append(changed)

    def lift(self) -> Changed:
        """Return what the present shard has changed, and put the buffers back."""
        changed = {}
        with torch.no_grad(), preserve_versions(tuple(self._named.values())):
            for name, buffer in self._named.items():
                if not _is_same(buffer, self._base[name]):
                    changed[name] = buffer.clone()
                    buffer.copy_(self._base[name])
        return changed

    def put(self, changed: Changed) -> None:
        """Let a shard go on with what it had changed before."""
        if changed:
            with torch.no_grad(), preserve_versions(tuple(self._named.values())):
                for name, value in changed.items():
                    self._named[name].copy_(value)

    def close(self) -> None:
        """Give all ranks the buffers of the next round. Collective, if there are buffers."""
        if not self._named:
            return
        names = list(self._named)
        changed = set().union(*self._found)
        with torch.no_grad(), preserve_versions(tuple(self._named.values())):
            agreed = self._agree_on_changed(names, changed)
            found = [name for name in names if name in agreed]
            self._combine_integers([n for n in found if not self._is_mean(n)])
            for dtype in sorted({self._named[n].dtype for n in found if self._is_mean(n)}, key=str):
                self._combine([n for n in found if self._named[n].dtype == dtype])
        self._found = []

    def _agree_on_changed(self, names: Sequence[str], changed: set[str]) -> set[str]:
        """Return what some shard of some rank has changed."""
        if self._shares.world == 1:
            return changed
        flags = torch.tensor([int(n in changed) for n in names])
        flags = flags.to(self._named[names[0]].device)
        self._sync.transport.messages.maximum("which buffers shards changed", flags)
        return {name for name, flag in zip(names, flags.tolist(), strict=True) if flag}

    def _is_mean(self, name: str) -> bool:
        buffer = self._named[name]
        return buffer.is_floating_point() or buffer.is_complex()

    def _of_shard(self, position: int, names: Sequence[str]) -> list[torch.Tensor]:
        found = self._found[position]
        return [found.get(name, self._base[name]) for name in names]

    def _combine_integers(self, names: Sequence[str]) -> None:
        """Take the largest value that any shard has."""
        if not names:
            return
        flats = [
            torch.cat([each.reshape(-1).to(torch.int64) for each in self._of_shard(p, names)])
            for p in range(len(self._found))
        ]
        largest = torch.stack(flats).amax(dim=0)
        if self._shares.world > 1:
            self._sync.transport.messages.maximum("buffers of shards", largest)
        self._write(names, largest)

    def _combine(self, names: Sequence[str]) -> None:
        """Take the mean over all shards, by the tree."""
        shares = self._shares
        stack = PartStack(shares.tree)
        for position, shard in enumerate(shares.owned):
            value: Gradients = [
                torch.cat([each.reshape(-1) for each in self._of_shard(position, names)])
            ]
            stack.push((shard, shard + 1), value)
        parts = [stack.value(position)[0] for position in range(len(stack))]
        flats = [part for part in parts if part is not None]
        total = torch.empty_like(flats[0]) if len(flats) > 1 else flats[0]
        start_tree_sum(self._sync.transport, shares, lambda: flats, total).wait()
        self._write(names, total.mul_(1.0 / shares.tree.shards))

    def _write(self, names: Sequence[str], flat: torch.Tensor) -> None:
        pieces = flat.split([self._named[name].numel() for name in names])
        for name, piece in zip(names, pieces, strict=True):
            buffer = self._named[name]
            buffer.copy_(piece.view(buffer.shape))


_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit: -0.0 is not 0.0, and a NaN is itself."""
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.contiguous().view(_OF_SIZE[tensor.itemsize])
