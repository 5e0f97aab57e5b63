"""Where layers that need all shards at once exchange rows: SyncBatchNorm's statistics and sums.

Owned by the loop over shards, which runs the shards of a rank in turns then
(:mod:`paceline.shards.turns`). Rows of all shards are in the order of shards on every rank, so what
is computed from them has the same bits at any number of ranks.

[Note: heads]
Before each exchange, and at the end of the round, ranks tell each other what they are about to
exchange. A rank whose shard has failed says so at the next of these, wherever the others are: all
raise, and none waits for rows that do not come.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn

from paceline.errors import ConfigurationError, PeerFailedError
from paceline.shards.tree import Shares
from paceline.shards.turns import Key, Turns
from paceline.torch_private.modules import TorchSyncBatchNorm
from paceline.types import Transport

_FORWARD, _BACKWARD = "the forward", "the backward"
_END: Key = ("the end", "its shards")
_FAILED = -1
_WHAT = "rows of all shards for SyncBatchNorm"


class ShardMeeting:
    """The layers of one module, and the round that is under way.

    Attributes:
        buffer_names: Buffers of these layers, which are the same for all shards.
        turns: Of the round that is under way.
        position: Whose turn it is, among the shards of this rank.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers: dict[str, Any] = {
            name: part
            for name, part in module.named_modules()
            if isinstance(part, TorchSyncBatchNorm)
        }
        self.buffer_names = {
            f"{name}.{buffer}" if name else buffer
            for name, layer in self._layers.items()
            for buffer, _ in layer.named_buffers()
        }
        self._is_told = True
        self.turns: Turns[torch.Tensor] | None = None
        self.position = 0

    @property
    def is_needed(self) -> bool:
        """Whether some layer normalises over all shards now."""
        return any(layer.training for layer in self._layers.values())

    def open(self, transport: Transport, shares: Shares, turns: Turns[torch.Tensor]) -> None:
        """Begin a round: let layers meet."""
        self._transport, self._shares, self.turns = transport, shares, turns
        self._is_told = False
        for name, layer in self._layers.items():
            layer.over_shards = LayerMeeting(self, name)

    def close(self) -> None:
        """The round is over, well or not."""
        self.turns = None
        for layer in self._layers.values():
            layer.over_shards = None

    # --- exchange ------------------------------------------------------------------------------

    def combine(self, key: Key, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        """Give each shard of this rank the rows of all shards, or their sum in the backward."""
        everything = self._gather(key, torch.stack(rows))
        if key[0] == _BACKWARD:
            tree = self._shares.tree
            leaves = {(n, n + 1): row for n, row in enumerate(everything.unbind(0))}
            everything = tree.combine(leaves, torch.add)
        return [everything] * len(rows)

    def _gather(self, key: Key, mine: torch.Tensor) -> torch.Tensor:
        shares = self._shares
        if shares.world == 1:
            return mine
        self._exchange_heads(key, mine[0].nbytes)
        counts = [sum(end - begin for begin, end in parts) for parts in shares.parts]
        padded = mine.new_zeros(max(counts), mine.shape[1])
        padded[: len(mine)] = mine
        found = self._transport.messages.gather(_WHAT, padded)
        return torch.cat([rows[:count] for rows, count in zip(found, counts, strict=True)])

    def end(self) -> None:
        """All shards of this rank have ended: wait for the other ranks.

        Raises:
            PeerFailedError: If one has failed.
        """
        if self._shares.world > 1:
            self._exchange_heads(_END, 0)

    def fail(self) -> None:
        """Tell the other ranks that a shard has failed, unless one of them has told us."""
        if not self._is_told and self._shares.world > 1:
            self._is_told = True
            self._gather_heads(_FAILED, 0)

    def _gather_heads(self, code: int, size: int) -> list[list[int]]:
        head = torch.tensor([code, size], dtype=torch.int64)
        return [each.tolist() for each in self._transport.messages.gather(_WHAT, head)]

    def _exchange_heads(self, key: Key, size: int) -> None:
        mine = [zlib.crc32(" ".join(key).encode()), size]
        try:
            heads = self._gather_heads(*mine)
        except BaseException:
            self._is_told = True  # nobody is there to be told
            raise
        failed = [rank for rank, (code, _) in enumerate(heads) if code == _FAILED]
        others = [rank for rank, head in enumerate(heads) if head != mine]
        self._is_told = bool(others)
        if failed:
            raise PeerFailedError(
                f"Rank {failed[0]} could not run its shards to their end, so no rank can end this "
                "round. Its own error says why; look at its log.",
                rank=failed[0],
                operation=f"{' of '.join(key)}",
            )
        if others:
            raise ConfigurationError(
                f"Rank {self._shares.rank} is at {' of '.join(key)}, with {size} bytes for each "
                f"shard; ranks {others} are elsewhere. All shards must run the same SyncBatchNorm "
                "layers in the same order, on inputs with the same number of channels."
            )


class LayerMeeting:
    """How one layer talks to all shards: :class:`paceline.types.ShardExchange`."""

    always_sums = True

    def __init__(self, meeting: ShardMeeting, name: str) -> None:
        self._meeting = meeting
        self._name = name or "the module"

    @property
    def is_first(self) -> bool:
        """Whether the shard that runs is this rank's first."""
        return self._meeting.position == 0

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the rows of all shards, in their order."""
        return self._meet(_FORWARD, row)

    def sum(self, values: torch.Tensor) -> None:
        """Replace the values by their sum over all shards, along the tree."""
        values.copy_(self._meet(_BACKWARD, values.reshape(-1)).view_as(values))

    def _meet(self, what: str, row: torch.Tensor) -> torch.Tensor:
        turns = self._meeting.turns
        if turns is None:
            raise ConfigurationError(
                f"{self._name} is a SyncBatchNorm, and its round over shards has ended: run the "
                "backward inside of the function that ddp.run_shards(batch, function) calls."
            )
        return turns.meet((what, self._name), row)
