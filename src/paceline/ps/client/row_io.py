"""Rows as such: read without a graph, and overwritten. Called by the modules.

In pieces, so that neither side needs much more memory than the rows themselves, and no message is
too large for a server.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.errors import BagsError, CollectiveInputError
from paceline.ps.client.batch import FlatBags, flat_ids
from paceline.ps.client.batch_exchange import BatchExchange
from paceline.ps.client.message_parts import RowsPart, message
from paceline.ps.client.message_plan import planned
from paceline.ps.client.table_set import TableSet
from paceline.ps.protocol.wire import Kind

PIECE_BYTES = 16 << 20


def read_rows(tables: TableSet, table: int, ids: Tensor) -> Tensor:
    """The rows of some ids, in their order, duplicates included. Changes nothing.

    Raises:
        IdRangeError: An id is outside of the table.
    """
    config = tables.attached[table].config
    flat = flat_ids(config.name, ids)
    rows = torch.empty((flat.count, config.embedding_dim), dtype=config.dtype)
    step = _piece(tables, table)
    for at in range(0, flat.count, step):
        part = _part(tables, table, flat, at, at + step)
        exchange = BatchExchange([part], tables.servers.channels)
        exchange.ask(0)
        (rows[at : at + step],) = exchange.collect()
    return rows.view(*ids.shape, config.embedding_dim)


def write_rows(tables: TableSet, table: int, ids: Tensor, rows: Tensor) -> None:
    """Overwrite rows; their optimizer state begins anew. Returns when all servers have them.

    Raises:
        IdRangeError: An id is outside of the table.
        BagsError: An id comes twice.
        CollectiveInputError: The rows do not fit.
    """
    config = tables.attached[table].config
    flat = flat_ids(config.name, ids)
    expected = (flat.count, config.embedding_dim)
    if tuple(rows.shape) != expected or rows.dtype != config.dtype:
        raise CollectiveInputError(
            f"table {config.name!r}: {flat.count} ids are written by rows of shape {expected} "
            f"and {config.dtype}, not {tuple(rows.shape)} and {rows.dtype}"
        )
    if len(np.unique(flat.ids_array)) != flat.count:
        raise BagsError(f"table {config.name!r}: an id comes twice: which row is meant?")
    tables.servers.epoch += 1
    step = _piece(tables, table)
    for at in range(0, flat.count, step):
        _write(tables, _part(tables, table, flat, at, at + step), rows[at : at + step])
    tables.servers.flush()


def _write(tables: TableSet, part: RowsPart, rows: Tensor) -> None:
    ordered = torch.empty_like(rows, memory_format=torch.contiguous_format)
    ordered[part.plan.places] = rows.detach()
    values = part.gradient(ordered)
    asked = []
    for server, channel in enumerate(tables.servers.channels):
        share = part.push(server, values[server], tables.lrs)
        if share is not None:
            asked.append((channel, channel.post(message(Kind.WRITE, [share]))))
    for channel, pending in asked:
        channel.wait(pending)


def _part(tables: TableSet, table: int, flat: FlatBags, low: int, high: int) -> RowsPart:
    ids = flat.ids[low:high]
    piece = FlatBags(ids, None, None, ids.shape, flat.device)
    (group,) = tables.groups_of({table: piece})
    return RowsPart(group, planned(group, [piece], tables.lrs), [piece])


def _piece(tables: TableSet, table: int) -> int:
    config = tables.attached[table].config
    return max(1, PIECE_BYTES // (config.embedding_dim * config.dtype.itemsize + 8))
