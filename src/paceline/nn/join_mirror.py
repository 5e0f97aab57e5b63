"""SyncBatchNorm under ``join``: a rank without inputs takes part in the others' messages.

Made by the wrapper's join hook, through ``SyncBatchNorm.mirror_for_join``, on every rank.

[Note: a group of its own]
In backward, the messages of these layers mix with the wrapper's buckets, in an order that a rank
which computes nothing cannot know. So inside of a join context the layers talk over a twin of their
group: there the order is that of the layers alone, which is the same in every step, and the rank
repeats what its own latest step sent. It does so beside the wrapper's messages, on a thread of its
own: which of the two the other ranks wait for first is not known either.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.liveness import watch_of
from paceline.nn.exchange import ExchangeTerms, RecordedExchange

if TYPE_CHECKING:
    from paceline.nn.sync_batchnorm import SyncBatchNorm

# A join context is often made once per data epoch: its group is made once per group.
_twins: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class NormMirror:
    """All SyncBatchNorm layers of a model in one join context."""

    def __init__(self, module: nn.Module, layers: Sequence[SyncBatchNorm]) -> None:
        self._layers = layers
        self._exchanges: dict[Any, RecordedExchange] = {}
        for layer in layers:
            layer._exchange = self._exchange_of(layer)
        self._handle = module.register_forward_pre_hook(self._forget)

    def _exchange_of(self, layer: SyncBatchNorm) -> RecordedExchange:
        group: Any = layer.process_group or dist.group.WORLD
        if group not in self._exchanges:
            self._exchanges[group] = RecordedExchange(_twin(group))
        return self._exchanges[group]

    def _forget(self, _module: nn.Module, _inputs: Any) -> None:
        """A new step begins."""
        for exchange in self._exchanges.values():
            exchange.messages.clear()

    def mirror_step(self) -> None:
        """Repeat the messages of this rank's latest step, or of a step with each layer once."""
        for exchange in self._exchanges.values():
            messages = list(exchange.messages) or self._expected(exchange)
            for message in messages:
                exchange.repeat(message)

    def _expected(self, exchange: RecordedExchange) -> list[ExchangeTerms]:
        forward, backward = [], []
        for layer in self._layers:
            if layer._exchange is not exchange or not layer.training:
                continue
            tensor = next(iter([*layer.parameters(), *layer.buffers()]), torch.empty(0))
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            channels = layer.num_features
            forward.append(ExchangeTerms(True, 2 * channels + 1, dtype, tensor.device))
            backward.append(ExchangeTerms(False, 2 * channels, dtype, tensor.device))
        return [*forward, *reversed(backward)]

    def leave(self) -> None:
        """Let the layers talk over their own groups again."""
        self._handle.remove()
        for layer in self._layers:
            layer._exchange = None


def _twin(group: Any) -> Any:
    """Return a second group of the same ranks; every rank of the group asks for it together."""
    if group not in _twins:
        ranks = dist.get_process_group_ranks(group)
        make = partial(
            dist.new_group,
            ranks,
            backend=dist.get_backend(group),
            use_local_synchronization=True,
        )
        _twins[group] = watch_of(group).call("the making of a group for join", make)
    return _twins[group]
