"""LOAD: the rows of a save in the place of those that are here, all of them or none.

Called by ``ps/server/loads.py`` and ``ps/storage/durable.py``. ``find_save`` reads and checks
every file that is needed, sizes and checksums included, and changes nothing. Then rows go to a file
of the server's own directory, which is made part of its state by one record of the journal
(``write_loaded``, ``read_loaded``); or, without a directory, to tables beside those that are there
(``build_aside``).

[Note: why a load cannot be half done]
A server with a directory: the file is complete and synced before the record that names it is
written, and the record is the moment of the load. Killed before, the server comes back as it was;
killed after, with what was loaded. The original files may be gone by then. Memory never holds both.
A server without: old tables are untouched until all new ones are complete, which takes memory for
both; whether there is as much is checked first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import ConfigurationError
from paceline.ps.protocol.sharding import is_owner
from paceline.ps.protocol.table_spec import Shard
from paceline.ps.state.refusal import Code, Refusal
from paceline.ps.state.store import Change, Store
from paceline.ps.state.table import MemoryBudget, Table
from paceline.ps.storage.save import check_file
from paceline.ps.storage.save_files import files_of
from paceline.ps.storage.snapshot import (
    LINES,
    VERSION,
    column_widths,
    describe,
    fill_table,
    open_checked,
    parse,
    read_table,
)
from paceline.ps.storage.tensor_file import (
    Stream,
    TensorFile,
    open_tensors,
    write_tensors,
)

FORMAT = "paceline-ps-loaded"


@dataclass(frozen=True)
class Part:
    """What one table gets.

    Args:
        table: Which.
        paths: The files of all its shards.
        count: So many of their rows belong to this server.
        step: The table's.
    """

    table: Table
    paths: tuple[Path, ...]
    count: int
    step: int

    @property
    def size(self) -> int:
        """In bytes, as ``--max-bytes`` counts."""
        return self.count * self.table.row_bytes


def find_save(store: Store, directory: Path) -> list[Part]:
    """Check all files that a LOAD needs, completely.

    Raises:
        Refusal: One is missing, damaged, or of another table; or there is no room for the rows.
    """
    try:
        found = files_of(directory, [table.spec.name for table in store.tables])
        parts = [_part(table, found[table.spec.name]) for table in store.tables]
    except (OSError, ValueError, KeyError, TypeError, ConfigurationError) as error:
        raise Refusal(
            Code.LOAD, f"{directory} cannot be loaded: {error}. Nothing was changed"
        ) from None
    _check_sizes(directory, parts, store.budget.limit_bytes)
    return parts


def _part(table: Table, paths: Sequence[Path]) -> Part:
    count = step = 0
    layouts = {(shard.sharding, shard.count) for shard in _shards(table, paths)}
    if len(layouts) > 1:
        raise ValueError(f"table {table.spec.name!r} is there from several saves: {layouts}")
    for path in paths:
        with open_tensors(path) as file:
            step = max(step, parse(json.loads(file.metadata["table"])).step)
            for ids in _pieces(file, "ids"):
                count += int(np.count_nonzero(_owned(table, ids.numpy())))
    return Part(table, tuple(paths), count, step)


def _shards(table: Table, paths: Sequence[Path]) -> list[Shard]:
    """Which shard each file has; all are read and checked."""
    shards = [check_file(path, table) for path in paths]
    for index, (path, shard) in enumerate(zip(paths, shards, strict=True)):
        if shard.index != index:
            raise ValueError(f"{path.name} has shard {shard.index}: files were renamed")
    return shards


def _check_sizes(directory: Path, parts: Sequence[Part], limit_bytes: int) -> None:
    total = sum(part.size for part in parts)
    if total <= limit_bytes:
        return
    largest = max(parts, key=lambda part: part.size)
    name = largest.table.spec.name
    raise Refusal(
        Code.SIZE,
        f"{directory} does not fit: the rows of this server would take {total} bytes, of which "
        f"{largest.size} are {largest.count} rows of table {name!r}, and --max-bytes is "
        f"{limit_bytes}: raise it, or add servers. Nothing was changed",
        table=name,
    )


def build_aside(store: Store, parts: Sequence[Part]) -> Change:
    """Read rows into new tables; returns what puts them in the place of the old ones.

    Raises:
        Refusal: There is no memory for both.
    """
    check_memory(parts)
    budget = MemoryBudget(store.budget.limit_bytes)
    new = [_filled(part, budget) for part in parts]

    def change() -> dict[str, Any]:
        for part, table in zip(parts, new, strict=True):
            part.table.take_over(table)
        return {"rows": sum(part.count for part in parts)}

    return change


def _filled(part: Part, budget: MemoryBudget) -> Table:
    old = part.table
    table = Table(old.number, old.spec, old.shard, budget)
    for path in part.paths:
        with open_tensors(path) as file:
            for ids, rows, state in read_table(file, "", table):
                mine = torch.from_numpy(_owned(table, ids.numpy()))
                if mine.any():
                    kept = tuple(column[mine] for column in state)
                    table.adopt(ids[mine].numpy(), rows[mine], kept)
    table.step = part.step
    return table


def check_memory(parts: Sequence[Part]) -> None:
    """Refuse to build what has no room beside what is there."""
    needed, free = sum(part.size for part in parts), _free_bytes()
    if free is not None and needed > free:
        raise Refusal(
            Code.SIZE,
            f"a server without --dir reads saved rows beside those it has: that takes {needed} "
            f"bytes, and {free} are free. Load into a server that was just started, or give it "
            "--dir, which needs no second copy in memory. Nothing was changed",
        )


def _free_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def write_loaded(path: Path, parts: Sequence[Part]) -> int:
    """Copy the rows of this server into one file of its own; returns how many.

    Raises:
        OSError: The disk does not want to; nothing is left behind.
        ValueError: The save has changed meanwhile.
    """
    tensors: dict[str, Stream] = {}
    for part in parts:
        table, prefix = part.table, f"{part.table.number}."
        tensors[f"{prefix}ids"] = Stream(torch.int64, (part.count,), _lines(part, "ids"))
        dtypes = [table.dtype, *(column.dtype for column in table.columns)]
        for (name, width), dtype in zip(column_widths(table).items(), dtypes, strict=True):
            tensors[prefix + name] = Stream(dtype, (part.count, width), _lines(part, name))
    tables = [{**describe(part.table), "step": part.step} for part in parts]
    metadata = {"format": FORMAT, "version": VERSION, "tables": json.dumps(tables)}
    write_tensors(path, tensors, metadata)
    return sum(part.count for part in parts)


def is_for(path: Path, store: Store) -> bool:
    """Say whether a file of ``write_loaded`` is whole, and of the tables that are here.

    Raises:
        ValueError, OSError: It cannot be read.
    """
    with open_checked(path, FORMAT) as file:
        found = [parse(each) for each in json.loads(file.metadata["tables"])]
    here = [(table.spec, table.shard) for table in store.tables]
    return [(each.spec, each.shard) for each in found] == here


def read_loaded(path: Path, store: Store) -> int:
    """Replace the rows of all tables; returns how many there are. Check with ``is_for`` before.

    Raises:
        ValueError, OSError, Refusal: It cannot be read. Rows are missing then.
    """
    with open_tensors(path) as file:
        for table in store.tables:
            table.clear()
        for table, described in zip(store.tables, json.loads(file.metadata["tables"]), strict=True):
            fill_table(table, file, parse(described).step)
    return sum(table.count for table in store.tables)


def _lines(part: Part, name: str) -> Iterator[Tensor]:
    """What this server owns of one kind of values, from all files."""
    for path in part.paths:
        with open_tensors(path) as file:
            for ids, values in zip(_pieces(file, "ids"), _pieces(file, name), strict=True):
                mine = torch.from_numpy(_owned(part.table, ids.numpy()))
                yield values[mine]


def _pieces(file: TensorFile, name: str) -> Iterator[Tensor]:
    for start in range(0, file.shape(name)[0], LINES):
        yield file.lines(name, start, start + LINES)


def _owned(table: Table, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < table.spec.rows:
        raise ValueError(f"table {table.spec.name!r} has ids out of range")
    return is_owner(table.shard, table.spec.rows, ids)
