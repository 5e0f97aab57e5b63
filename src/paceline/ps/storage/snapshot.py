"""A whole store in one file, and back.

Called by ``ps/storage/durable.py``. The file (``ps/storage/tensor_file.py``) has for each table the
ids, rows and state of its slots, and the clients with what of theirs is applied: all of one moment.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ConfigurationError, ServerStateError
from paceline.ps.protocol.table_spec import Shard, Sharding, TableSpec
from paceline.ps.state.clients import Client
from paceline.ps.state.refusal import Refusal
from paceline.ps.state.store import Store
from paceline.ps.state.table import Table
from paceline.ps.storage.tensor_file import TensorFile, has_checksum, open_tensors, write_tensors

log = logging.getLogger("paceline.ps")

FORMAT = "paceline-ps-snapshot"
VERSION = "2"
_UNCHECKED = "1"
"""Has no checksum."""
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
        is_checked = has_checksum(path)
        with open_tensors(path) as file:
            check_version(file, FORMAT, is_checked)
            for described in json.loads(file.metadata["tables"]):
                spec, shard, step = parse(described)
                table = store.create(spec, shard)
                for ids, rows, state in read_table(file, f"{table.number}.", table):
                    table.adopt(ids.numpy(), rows, state)
                table.step = step
            _read_clients(file, store)
    except (ValueError, KeyError, TypeError, OSError, ConfigurationError) as error:
        raise ServerStateError(f"the snapshot {path} cannot be read: {error}") from error
    except Refusal as refusal:
        raise ServerStateError(f"the snapshot {path} does not fit: {refusal.text}") from refusal


def describe(table: Table) -> dict[str, object]:
    """What a table is, as JSON takes it."""
    shard = table.shard
    return {
        "table": table.spec.to_json(),
        "shard": {"sharding": shard.sharding.value, "index": shard.index, "count": shard.count},
        "step": table.step,
    }


def parse(described: Mapping[str, Any]) -> tuple[TableSpec, Shard, int]:
    """The inverse of ``describe``."""
    shard = described["shard"]
    return (
        TableSpec.from_json(described["table"]),
        Shard(Sharding(shard["sharding"]), int(shard["index"]), int(shard["count"])),
        int(described["step"]),
    )


def table_tensors(table: Table) -> dict[str, Tensor]:
    """All that a table keeps, by name: views of its memory, in the order of its slots."""
    if not table.count:
        return {}
    names = ["rows", *(f"state.{column.name}" for column in table.columns)]
    kept = zip(names, table.storage.kept(), strict=True)
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
    if f"{prefix}ids" not in file.names:
        return
    columns = column_widths(table)
    count = file.shape(f"{prefix}ids")[0]
    for name, width in columns.items():
        if file.shape(prefix + name) != [count, width]:
            raise ValueError(f"{prefix + name} has shape {file.shape(prefix + name)}")
    for start in range(0, count, LINES):
        stop = start + LINES
        rows, *state = (file.lines(prefix + name, start, stop) for name in columns)
        yield file.lines(f"{prefix}ids", start, stop), rows, tuple(state)


def check_version(file: TensorFile, wanted: str, is_checked: bool) -> None:
    """Refuse another kind of file, another version, and one whose checksum is missing.

    Args:
        file: Which.
        wanted: Its format.
        is_checked: Whether it had a checksum, and the right one.

    Raises:
        ValueError: What is wrong with it.
    """
    kind, version = file.metadata.get("format"), file.metadata.get("version")
    if kind != wanted:
        raise ValueError(f"{file.path.name} is no {wanted} but {kind}")
    if version not in (VERSION, _UNCHECKED):
        raise ValueError(
            f"{file.path.name} is of version {version}, and this Paceline reads {VERSION}"
        )
    if version == VERSION and not is_checked:
        raise ValueError(f"{file.path.name} is damaged: its checksum is missing")
    if not is_checked:
        log.warning("%s has no checksum: an older Paceline wrote it. Read as it is", file.path)


def _read_clients(file: TensorFile, store: Store) -> None:
    names, applied = file.whole("clients"), file.whole("applied").tolist()
    clients = [
        (bytes(name.tolist()), Client(bytes(name.tolist()), count))
        for name, count in zip(names, applied, strict=True)
    ]
    for line, sequence, refusal in json.loads(file.metadata["refusals"]):
        client = clients[line][1]
        client.refusals = {**(client.refusals or {}), sequence: Refusal.from_json(refusal)}
        client.refused += 1
    if "refused" in file.metadata:  # older snapshots do not have it
        for (_, client), refused in zip(clients, json.loads(file.metadata["refused"]), strict=True):
            client.refused = int(refused)
    for name, client in clients:
        store.clients.restore(name, client)
