"""What ranks tell each other of the buffers of a round, and what they make of them.

Called by ``shard_buffers.py`` at the end of a round.

[Note: which buffers travel]
Those that some shard of some rank has changed in this round: flags say which, so all ranks know the
same ones. The others are not touched: the mean of equal values need not be that value.

[Note: equal at the beginning]
After a round all ranks have the same buffers. Something else may change them before the next one: a
forward in training mode that evaluates on one rank, a state that one rank alone has loaded. Then
versions have moved, and a checksum travels with the flags: ranks that differ raise, all of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from paceline.ddp.agree.checksum import checksums, combine
from paceline.ddp.features.buffers import BufferSync
from paceline.errors import ConfigurationError
from paceline.shards.sums import Gradients, PartStack
from paceline.shards.tree import Shares
from paceline.shards.tree_sum import start_tree_sum

_UNCHANGED = 0
"""The code of buffers that are those of the last round."""

Named = Mapping[str, torch.Tensor]


@dataclass
class FoundBuffers:
    """What one shard has made of buffers.

    Attributes:
        changed: Those that have another value.
        made: Those that were not there, or had another shape or dtype; None: that are gone.
    """

    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    made: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def signature(self) -> int:
        """Stand for all that was made."""
        if not self.made:
            return 0
        named = sorted(self.made.items())
        text = repr([(name, None if v is None else (v.shape, v.dtype)) for name, v in named])
        values = checksums([value for _, value in named if value is not None])
        return combine([zlib.crc32(text.encode()), *values]) >> 2


class BufferExchange:
    """The buffers of one wrapper, between its ranks."""

    def __init__(self, sync: BufferSync) -> None:
        self._sync = sync
        self.forget()

    def forget(self) -> None:
        """Other ranks may have other buffers."""
        self._known: list[tuple[int, int]] | None = None

    def note(self, named: Named) -> None:
        """All ranks have these."""
        self._known = _versions(named)

    def open(self, named: Named, shares: Shares) -> None:
        """A round begins with these: see [Note: equal at the beginning]."""
        self._code = _UNCHANGED
        if shares.world > 1 and self._known != _versions(named):
            self._code = combine(checksums(list(named.values()))) >> 2

    def run(
        self, named: Named, base: Named, found: Sequence[FoundBuffers], shares: Shares
    ) -> dict[str, torch.Tensor | None]:
        """Write to buffers what all shards make of them; return those that shards have made.

        Collective.

        Raises:
            ConfigurationError: Ranks have begun with other buffers, or shards have made other ones.
        """
        self._shares, self._named, self._base, self._found = shares, named, base, found
        changed = {name for each in found for name in each.changed}
        agreed = self._agree_on_changed(list(base), changed)
        self._combine_integers([n for n in agreed if not self._is_mean(n)])
        for dtype in sorted({named[n].dtype for n in agreed if self._is_mean(n)}, key=str):
            self._combine([n for n in agreed if named[n].dtype == dtype])
        self._found = ()
        return found[0].made

    # --- what has changed ----------------------------------------------------------------------

    def _agree_on_changed(self, names: Sequence[str], changed: set[str]) -> list[str]:
        """Return what some shard of some rank has changed, in one order."""
        signatures = {each.signature() for each in self._found}
        if self._shares.world == 1:
            if len(signatures) > 1:
                raise self._made_differ()
            return [name for name in names if name in changed]
        flags = [int(name in changed) for name in names]
        device = next(iter(self._named.values())).device if self._named else "cpu"
        told = torch.tensor(
            [*flags, self._code, -self._code, max(signatures), -min(signatures)], device=device
        )
        self._sync.transport.messages.maximum("which buffers shards changed", told)
        *flags, high, low, most, least = told.tolist()
        if high != -low:
            raise ConfigurationError(
                f"Rank {self._shares.rank}: ranks had different buffers when this round began, "
                "though they were equal after the one before. A forward outside of the loop over "
                "shards has changed BatchNorm's statistics (call eval() first), or some ranks have "
                "loaded another state than others."
            )
        if most != -least:
            raise self._made_differ()
        return [name for name, flag in zip(names, flags, strict=True) if flag]

    def _made_differ(self) -> ConfigurationError:
        names = sorted({name for each in self._found for name in each.made})
        return ConfigurationError(
            f"Rank {self._shares.rank}: a forward may make a buffer, or change its shape or dtype, "
            f"only if it is the same in all shards, as a cache is. These are not: "
            f"{', '.join(names[:5]) or 'buffers of another rank'}. Make them before training."
        )

    def _is_mean(self, name: str) -> bool:
        buffer = self._named[name]
        return buffer.is_floating_point() or buffer.is_complex()

    # --- what is made of it --------------------------------------------------------------------

    def _of_shard(self, position: int, names: Sequence[str]) -> list[torch.Tensor]:
        found = self._found[position].changed
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

        def make(begin: int, end: int) -> list[torch.Tensor]:
            return [flat[begin:end] for flat in flats]

        start_tree_sum(self._sync.transport, shares, make, total).wait()
        self._write(names, total.mul_(1.0 / shares.tree.shards))

    def _write(self, names: Sequence[str], flat: torch.Tensor) -> None:
        pieces = flat.split([self._named[name].numel() for name in names])
        for name, piece in zip(names, pieces, strict=True):
            buffer = self._named[name]
            buffer.copy_(piece.view(buffer.shape))


def _versions(named: Named) -> list[tuple[int, int]]:
    return [(id(each), each._version) for each in named.values()]
