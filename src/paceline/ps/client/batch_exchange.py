"""One batch's way to the servers and back: planned, asked for, collected, pushed.

Called by ``ps/client/table_set.py``. An exchange belongs to one batch of one module; its graph
keeps it alive until its backward has pushed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

from torch import Tensor

from paceline.errors import ServerError
from paceline.ps.client.bag_pooling import BagPooling
from paceline.ps.client.channel import Channel
from paceline.ps.client.ledger import OpenRequest
from paceline.ps.client.message_parts import BagsPart, Part, RowsPart, message
from paceline.ps.client.refused_pushes import check_refused
from paceline.ps.protocol.wire import Frame, Kind, is_repeated


class Stage(enum.Enum):
    """Where an exchange is."""

    PLANNED = "planned"
    """It is known which rows are needed."""
    ASKED = "asked"
    """Each server has been asked; the replies may be on their way."""
    COLLECTED = "collected"
    """The rows are here. It may push, once for each backward."""


class BatchExchange:
    """One batch.

    Args:
        parts: What is looked up.
        channels: One for each server.

    Attributes:
        stage: See :class:`Stage`.
        tables: The tables in the order of outputs: those of each part, one part after the other.
        pools: What pools the parts whose rows travel.
        pushes_before: How many pushes of its module had been made when servers were asked.
    """

    def __init__(self, parts: Sequence[Part], channels: Sequence[Channel]) -> None:
        self.parts = tuple(parts)
        self.stage = Stage.PLANNED
        self.pushes_before = 0
        self.pools = [BagPooling(part) for part in parts if isinstance(part, RowsPart)]
        self.tables = [table for part in parts for table in part.tables]
        self._channels = channels
        self._asked: list[tuple[Channel, OpenRequest]] = []

    def ask(self, pushes_before: int) -> None:
        """Send one lookup to each server that has something of this batch."""
        self.pushes_before = pushes_before
        for server, channel in enumerate(self._channels):
            shares = [share for part in self.parts if (share := part.lookup(server)) is not None]
            if shares:
                self._asked.append((channel, channel.post(message(Kind.LOOKUP, shares))))
        self.stage = Stage.ASKED

    def forget(self) -> None:
        """The rows are not needed, or not any more: back to ``PLANNED``."""
        for channel, pending in self._asked:
            channel.abandon(pending)
        self._asked.clear()
        self.stage = Stage.PLANNED

    def collect(self) -> tuple[Tensor, ...]:
        """Wait for the replies, and give the bags of each table.

        Raises:
            PushRefusedError: A server has refused a push that these rows should have.
        """
        try:
            for channel, pending in self._asked:
                self._distribute(channel, pending, channel.wait(pending))
            check_refused(self._channels, "lookup")
        except BaseException:
            self.forget()
            raise
        self._asked.clear()
        self.stage = Stage.COLLECTED
        pools = iter(self.pools)
        outputs: list[Tensor] = []
        for part in self.parts:
            found = part.result()
            if isinstance(part, BagsPart):
                outputs.append(found.to(part.input.device))
            else:
                outputs.extend(next(pools).forward(found))
        return tuple(outputs)

    def push(self, gradients: Sequence[Tensor | None], lrs: Sequence[float], scale: float) -> bool:
        """Send one push to each server that has something of it; say whether there was any."""
        given: list[tuple[Part, Sequence[Frame]]] = []
        for pool, mine in self._by_pool(gradients):
            pieces = pool.backward(mine, scale)
            if pieces is not None:
                given.append((pool.part, pieces))
        if len(self.pools) < len(self.parts):
            given.extend(self._of_bags(gradients, scale))
        sent = [self._push(server, given, lrs) for server in range(len(self._channels))]
        return any(sent)

    def weights(self) -> list[Tensor | None]:
        """The weights of all tables that have some and whose rows travel."""
        pools = [pool for pool in self.pools if pool.part.group.key.is_weighted]
        return [each.weights for pool in pools for each in pool.part.inputs]

    def weights_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of ``weights()``."""
        found: list[Tensor | None] = []
        for pool, mine in self._by_pool(gradients):
            if pool.part.group.key.is_weighted:
                found.extend(pool.weights_backward(mine))
        return found

    def _of_bags(
        self, gradients: Sequence[Tensor | None], scale: float
    ) -> Iterator[tuple[Part, Sequence[Frame]]]:
        """What the parts that servers pool have to push."""
        given = dict(zip(self.tables, gradients, strict=True))
        for part in self.parts:
            if isinstance(part, BagsPart):
                gradient = given[part.table]
                if gradient is not None:
                    yield part, part.gradient(gradient if scale == 1.0 else gradient * scale)

    def _by_pool(
        self, gradients: Sequence[Tensor | None]
    ) -> Iterator[tuple[BagPooling, Sequence[Tensor | None]]]:
        if len(self.parts) == len(self.pools) == 1:
            yield self.pools[0], gradients
            return
        given = dict(zip(self.tables, gradients, strict=True))
        for pool in self.pools:
            yield pool, [given[table] for table in pool.part.tables]

    def _push(
        self, server: int, given: list[tuple[Part, Sequence[Frame]]], lrs: Sequence[float]
    ) -> bool:
        shares = [
            share
            for part, pieces in given
            if (share := part.push(server, pieces[server], lrs)) is not None
        ]
        if shares:
            self._channels[server].post(message(Kind.PUSH, shares))
        return bool(shares)

    def _distribute(self, channel: Channel, pending: OpenRequest, frames: list[Frame]) -> None:
        server = channel.server.index
        sizes = [part.reply_bytes(server) for part in self.parts]
        # A FOUND repeats the records of its LOOKUP: then all sizes are the expected ones.
        is_expected = len(frames) == 3 and is_repeated(frames[0], Kind.FOUND, pending.tail)
        if not is_expected or len(frames[2]) != sum(sizes):
            text = (
                f"{channel.server} answered a {pending.what} with something else: are trainer and "
                "server of the same version?"
            )
            raise channel.server.error(ServerError, pending.what, text)
        values = memoryview(frames[2])
        at = 0
        for part, size in zip(self.parts, sizes, strict=True):
            if size:
                part.put(server, values[at : at + size])
            at += size
