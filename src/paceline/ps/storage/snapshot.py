"""A whole store in one file, and back.

Called by ``ps/storage/durable.py``. The file (``ps/storage/tensor_file.py``) has for each table the
ids, rows and state of its slots, and the clients with what of theirs is applied: all of one moment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import ConfigurationError, ServerStateError
from paceline.ps.protocol.table_spec import Shard, TableSpec
from paceline.ps.state.clients import Client
from paceline.ps.state.refusal import Refusal
from paceline.ps.state.store import Store
from paceline.ps.state.table import Table
from paceline.ps.storage.tensor_file import TensorFile, has_checksum, open_tensors, write_tensors

FORMAT = "paceline-ps-snapshot"
VERSION = "2"
LINES = 1 << 16
"""So many rows are read at a time."""


def write_snapshot(path: Path, store: Store) -> None:
    """Write the store as it is now. Called in a forked child, or at the end.

    Raises:
        OSError: The disk does not want to.
    """
    clients = store.clients.items()
    tensors = {
        "clients": torch.tensor([list(name) for name, _ in clients], dtype=torch.uint8),
        "applied": torch.tensor([client.applied for _, client in clients], dtype=torch.int64),
    }
    for table in store.tables:
        for name, tensor in table_tensors(table).items():
            tensors[f"{table.number}.{name}"] = tensor
    refusals = [
        [line, sequence, refusal.to_json()]
        for line, (_, client) in enumerate(clients)
        for sequence, refusal in (client.refusals or {}).items()
    ]
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "tables": json.dumps([describe(table) for table in store.tables]),
        "refusals": json.dumps(refusals),
        "refused": json.dumps([client.refused for _, client in clients]),
    }
    write_tensors(path, tensors, metadata)


def read_snapshot(path: Path, store: Store) -> None:
    """Fill an empty store.

    Raises:
        ServerStateError: The file is damaged, of another version, or larger than the store may be.
    """
    try:
        with open_checked(path, FORMAT) as file:
            for described in json.loads(file.metadata["tables"]):
                saved = parse(described)
                fill_table(store.create(saved.spec, saved.shard), file, saved.step)
            _read_clients(file, store)
    except (ValueError, KeyError, TypeError, OSError, ConfigurationError) as error:
        raise ServerStateError(f"the snapshot {path} cannot be read: {error}") from error
    except Refusal as refusal:
        raise ServerStateError(f"the snapshot {path} does not fit: {refusal.text}") from refusal


def describe(table: Table) -> dict[str, object]:
    """What a table is, as JSON takes it."""
    return {
        "table": table.spec.to_json(),
        "shard": table.shard.to_json(),
        "step": table.step,
    }


class SavedTable(NamedTuple):
    """What a file says of a table."""

    spec: TableSpec
    shard: Shard
    step: int


def parse(described: Mapping[str, Any]) -> SavedTable:
    """The inverse of ``describe``."""
    spec, shard = TableSpec.from_json(described["table"]), Shard.from_json(described["shard"])
    return SavedTable(spec, shard, int(described["step"]))


def table_tensors(table: Table) -> dict[str, Tensor]:
    """All that a table keeps, by name: views of its memory, in the order of its slots."""
    widths = column_widths(table)
    if not table.count:  # it need not have memory
        dtypes = [table.dtype, *(column.dtype for column in table.columns)]
        empty = [torch.empty((0, w), dtype=d) for w, d in zip(widths.values(), dtypes, strict=True)]
        return {"ids": torch.empty(0, dtype=torch.int64), **dict(zip(widths, empty, strict=True))}
    kept = zip(widths, table.storage.kept(), strict=True)
    return {"ids": torch.from_numpy(table.storage.ids()), **dict(kept)}


def column_widths(table: Table) -> dict[str, int]:
    """For rows and each kind of state its name in a file, and how many values a row has."""
    return {"rows": table.spec.dim, **{f"state.{c.name}": c.width for c in table.columns}}


Piece = tuple[Tensor, Tensor, tuple[Tensor, ...]]
"""Ids, rows and state of some rows."""


def read_table(file: TensorFile, prefix: str, table: Table) -> Iterator[Piece]:
    """All rows of a table, some thousand at a time.

    Raises:
        ValueError: Shapes are not the table's.
    """
    columns = column_widths(table)
    count = file.shape(f"{prefix}ids")[0]
    for name, width in columns.items():
        if file.shape(prefix + name) != [count, width]:
            raise ValueError(f"{prefix + name} has shape {file.shape(prefix + name)}")
    for start in range(0, count, LINES):
        stop = start + LINES
        rows, *state = (file.lines(prefix + name, start, stop) for name in columns)
        yield file.lines(f"{prefix}ids", start, stop), rows, tuple(state)


def fill_table(table: Table, file: TensorFile, step: int) -> None:
    """Give a table without rows all those of a file."""
    for ids, rows, state in read_table(file, f"{table.number}.", table):
        table.adopt(ids.numpy(), rows, state)
    table.step = step


@contextmanager
def open_checked(path: Path, wanted: str) -> Iterator[TensorFile]:
    """Open a file of this format, whose bytes are what was written.

    Raises:
        ValueError: It is damaged, of another format, or of another version.
        OSError: It cannot be read.
    """
    is_checked = has_checksum(path)
    with open_tensors(path) as file:
        kind, version = file.metadata.get("format"), file.metadata.get("version")
        if kind != wanted:
            raise ValueError(f"{path.name} is no {wanted} but {kind}")
        if version != VERSION:
            raise ValueError(
                f"{path.name} is of version {version}, and this Paceline reads {VERSION}"
            )
        if not is_checked:
            raise ValueError(f"{path.name} is damaged: its checksum is missing")
        yield file


def _read_clients(file: TensorFile, store: Store) -> None:
    names = [bytes(name) for name in file.whole("clients").tolist()]
    applied, refused = file.whole("applied").tolist(), json.loads(file.metadata["refused"])
    refusals: list[dict[int, Refusal]] = [{} for _ in names]
    for line, sequence, refusal in json.loads(file.metadata["refusals"]):
        refusals[line][sequence] = Refusal.from_json(refusal)
    for each in zip(names, applied, refusals, map(int, refused), strict=True):
        store.clients.restore(Client(*each))
