"""Buffers that a forward changes, such as BatchNorm's statistics: one set for each shard.

Every shard begins with the buffers of the last round. Afterwards a floating-point buffer is the
mean of what the shards have made of it, added up by the tree of the gradients; an integer one is
the largest. A buffer that no shard has changed stays as it is. Owned by the loop over shards;
ranks exchange buffers in ``shard_buffer_exchange.py``.

A forward may write to a buffer, or put another tensor in its place (``self.mean = 0.9 * self.mean +
0.1 * x.mean()``). Both count. One that a forward makes, or gives another shape, as caches are, has
no mean: it must be the same in all shards, and is kept.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from paceline.ddp.features.buffers import BufferPlace, BufferSync
from paceline.ddp.features.shard_buffer_exchange import BufferExchange, FoundBuffers
from paceline.shards.tree import Shares
from paceline.torch_private.autograd import preserve_versions


class ChangedBuffer(NamedTuple):
    """What a shard has made of a buffer; replaced: by another tensor in its place."""

    value: torch.Tensor | None
    is_replaced: bool


Changed = dict[str, ChangedBuffer]
"""By name."""


class ShardBuffers:
    """The buffers of one module in one round after the other."""

    def __init__(self, sync: BufferSync) -> None:
        self._sync = sync
        self._exchange = BufferExchange(sync)
        self._holders = sync.holders()

    def forget(self) -> None:
        """Go on with another group, whose ranks may have other buffers."""
        self._exchange.forget()

    def open(self, shares: Shares, without: Collection[str] = ()) -> None:
        """Begin a round: what is there now is where every shard begins.

        Those ``without`` are the same for all shards anyway.
        """
        self._shares = shares
        self._count = self._count_names()
        places = self._sync.places() if self._count else {}
        self._places = {n: place for n, place in places.items() if n not in without}
        self._without = without
        self._new_places: dict[str, BufferPlace] = {}
        present = {name: place.get() for name, place in self._places.items()}
        self._named = {n: buffer for n, buffer in present.items() if buffer is not None}
        self._base = {name: buffer.clone() for name, buffer in self._named.items()}
        self._found: list[FoundBuffers] = []
        self._exchange.open(self._named, shares)

    def take(self) -> None:
        """A shard has run: keep what it has changed, and put the buffers back."""
        self.add(self.lift())

    def add(self, changed: Changed) -> None:
        """Keep what the next shard has changed."""
        found = FoundBuffers()
        for name, (value, _) in changed.items():
            base = self._base.get(name)
            if value is not None and base is not None and _are_alike(value, base):
                found.changed[name] = value
            else:
                found.made[name] = value
        self._found.append(found)

    def lift(self) -> Changed:
        """Return what the present shard has changed, and put the buffers back."""
        changed = self._lift_new() if self._count_names() != self._count else {}
        with torch.no_grad(), preserve_versions(tuple(self._named.values())):
            for name, place in self._places.items():
                buffer, found = self._named.get(name), place.get()
                is_replaced = found is not buffer
                is_same = buffer is None or _is_same(buffer, self._base[name])
                if is_replaced:
                    value = None if found is None else found.detach().clone()
                    changed[name] = ChangedBuffer(value, is_replaced=True)
                    place.put(buffer)
                elif not is_same and buffer is not None:
                    changed[name] = ChangedBuffer(buffer.clone(), is_replaced=False)
                if not is_same and buffer is not None:
                    buffer.copy_(self._base[name])
        return changed

    def _count_names(self) -> int:
        return sum(map(len, filter(None, self._holders)))

    def _lift_new(self) -> Changed:
        """The same for buffers of which there was not even the name."""
        changed: Changed = {}
        for name, place in self._sync.places().items():
            if name not in self._places and name not in self._without:
                self._new_places[name] = place
                changed[name] = ChangedBuffer(place.get(), is_replaced=True)
                place.remove()
        return changed

    def put(self, changed: Changed) -> None:
        """Let a shard go on with what it had changed before."""
        if not changed:
            return
        with torch.no_grad(), preserve_versions(tuple(self._named.values())):
            for name, (value, is_replaced) in changed.items():
                if is_replaced:
                    self._place(name).put(value)
                elif value is not None:
                    self._named[name].copy_(value)

    def close(self) -> None:
        """Give all ranks the buffers of the next round. Collective, if there were buffers."""
        made = self._found[0].made
        if self._places:
            with torch.no_grad(), preserve_versions(tuple(self._named.values())):
                made = self._exchange.run(self._named, self._base, self._found, self._shares)
            self._exchange.note(self._named)
        # Where there were none, ranks see at the end of the next round that they have the same.
        for name, value in made.items():
            self._place(name).put(value)
        self._found = []

    def _place(self, name: str) -> BufferPlace:
        return self._places.get(name) or self._new_places[name]


def _are_alike(value: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a mean of the two can be taken."""
    return (value.shape, value.dtype, value.device) == (base.shape, base.dtype, base.device)


_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit: -0.0 is not 0.0, and a NaN is itself."""
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.contiguous().view(_OF_SIZE[tensor.itemsize])
