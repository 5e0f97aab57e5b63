"""What belongs to a shard while others have their turn: gradients, random streams, buffers.

For rounds whose shards run in turns (:mod:`paceline.shards.turns`); owned by the loop over shards,
which puts the process's own streams back at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.ddp.features.shard_buffers import Changed, ShardBuffers
from paceline.ddp.reduce.reducer import Reducer
from paceline.shards.streams import OwnStreams, seed_all
from paceline.shards.sums import Gradients
from paceline.torch_private.modules import TorchDDP


@dataclass
class ShardPlace:
    """What one shard has.

    Attributes:
        seed: Its random streams begin with it.
        streams: Where they stand; None: at their begin.
        gradients: What it has brought.
        changed: Buffers that it has changed.
        active: The wrapper whose forward it is in, for torch's compiler.
    """

    seed: int
    streams: OwnStreams | None = None
    gradients: Gradients = field(default_factory=list)
    changed: Changed = field(default_factory=dict)
    active: Any = None


class ShardPlaces:
    """The places of a rank's shards in one round.

    Args:
        reducer: Whose gradients are exchanged.
        buffers: Of the round.
        seeds: Of each shard's random streams.
        on_turn: Told whose turn it is.
    """

    def __init__(
        self,
        reducer: Reducer,
        buffers: ShardBuffers,
        seeds: Sequence[int],
        on_turn: Callable[[int], None],
    ) -> None:
        self._parameters = reducer.parameters
        self._end_shard = reducer.end_shard
        self._buffers = buffers
        self._on_turn = on_turn
        self.all = [ShardPlace(seed, active=TorchDDP._active_ddp_module) for seed in seeds]
        self._outer = TorchDDP._active_ddp_module

    def enter(self, position: int) -> None:
        """See :class:`paceline.shards.turns.Places`."""
        place = self.all[position]
        if place.streams is None:
            seed_all(place.seed)
        else:
            place.streams.put_back()
        TorchDDP._active_ddp_module = place.active
        for parameter, gradient in zip(self._parameters, place.gradients, strict=False):
            parameter.grad = gradient
        self._buffers.put(place.changed)
        self._on_turn(position)

    def leave(self, position: int) -> None:
        """See :class:`paceline.shards.turns.Places`."""
        place = self.all[position]
        self._end_shard()
        place.streams, place.active = OwnStreams(), TorchDDP._active_ddp_module
        place.gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        place.changed = self._buffers.lift()
        TorchDDP._active_ddp_module = self._outer
