"""SAVE: tables in a directory that any number of servers can read again.

Called by ``ps/server/dispatch.py``. Each server writes one file for each table's shard that it has
(ids, rows, optimizer state) and a part of the manifest, which is the last to appear;
``ps/storage/save_files.py`` says which files belong together. Loading (``ps/storage/load.py``)
reads the files of *all* shards and takes what is owned here, so servers may be more, fewer or cut
otherwise.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.ps.protocol.table_spec import Shard, TableSpec
from paceline.ps.state.refusal import Code, Refusal
from paceline.ps.state.store import Store
from paceline.ps.state.table import Table
from paceline.ps.storage import files
from paceline.ps.storage.save_files import (
    SAVE_ID,
    Save,
    all_of_shard,
    file_name,
    manifest_name,
    saves_in,
)
from paceline.ps.storage.snapshot import (
    VERSION,
    describe,
    open_checked,
    parse,
    read_table,
    table_tensors,
)
from paceline.ps.storage.tensor_file import write_tensors

FORMAT = "paceline-ps-table"


def save_job(store: Store, directory: Path, id: str) -> Callable[[], dict[str, Any]]:
    """What a forked child does to save all tables: returns the names of the files."""

    def work() -> dict[str, Any]:
        files.make_directories(directory)
        try:
            entries = [_write(table, directory, id) for table in store.tables]
            _write_manifest(store, directory, id, entries)
        except BaseException:
            _take_back(store, directory, id)
            raise
        return {"files": [entry["file"] for entry in entries]}

    return work


def tidy_job(store: Store, directory: Path, id: str) -> Callable[[], dict[str, Any]]:
    """What a forked child does when a save is complete on all servers: delete what is older.

    Manifests go first: what a manifest lists is always there.
    """

    def work() -> dict[str, Any]:
        saves = saves_in(directory)
        mine = saves.get(id, Save(id))
        for table in store.tables:
            mine.shards(table.spec.name)  # raises unless it is complete
        for save in saves.values():
            if save.time_s < mine.time_s:
                for path in (*save.manifests, *(directory / file for file in save.files)):
                    files.disk.unlink(path)
        _delete_orphans(store, directory)
        return {}

    return work


def _delete_orphans(store: Store, directory: Path) -> None:
    """Delete what interrupted saves of this server have left; its saves come one at a time."""
    listed = {file for save in saves_in(directory).values() for file in save.files}
    for table in store.tables:
        for path in directory.glob(all_of_shard(table.spec.name, table.shard)):
            if path.name not in listed:
                files.disk.unlink(path)


def save_id(control: Mapping[str, Any]) -> str:
    """The id that a message gives to a save, or one of its own.

    Raises:
        Refusal: It is none.
    """
    found = control.get("save", secrets.token_hex(8))
    if not isinstance(found, str) or not SAVE_ID.fullmatch(found):
        raise Refusal(Code.SAVE, "a save is named by 16 hexadecimal digits")
    return found


def _take_back(store: Store, directory: Path, id: str) -> None:
    """Delete what there is of a save that failed; a manifest that stays keeps its files."""
    with contextlib.suppress(OSError):
        files.disk.unlink(directory / manifest_name(_shards(store), id))
        for name, shard in _shards(store):
            files.disk.unlink(directory / file_name(name, shard, id))


def _shards(store: Store) -> list[tuple[str, Shard]]:
    return [(table.spec.name, table.shard) for table in store.tables]


def _write(table: Table, directory: Path, id: str) -> dict[str, Any]:
    path = directory / file_name(table.spec.name, table.shard, id)
    described = json.dumps(describe(table))
    metadata = {"format": FORMAT, "version": VERSION, "save": id, "table": described}
    size = write_tensors(path, table_tensors(table), metadata)
    return {"file": path.name, "rows": table.count, "bytes": size}


def check_file(path: Path, table: Table) -> Shard:
    """Read all of a table's file, and say which shard it is.

    Raises:
        ValueError: It is damaged, of another version, or of another table.
        OSError: It cannot be read.
    """
    with open_checked(path, FORMAT) as file:
        saved = parse(json.loads(file.metadata["table"]))
        wanted, there = _identity(table.spec), _identity(saved.spec)
        if wanted != there:
            raise ValueError(
                f"table {saved.spec.name!r} was saved as {there}, and is {wanted} here"
            )
        next(iter(read_table(file, "", table)), None)  # shapes
        return saved.shard


def _identity(spec: TableSpec) -> tuple[object, ...]:
    """What must be the same for rows to be taken over; lr and first values may differ."""
    return spec.name, spec.rows, spec.dim, spec.dtype.name, type(spec.optimizer).__name__


def _write_manifest(
    store: Store, directory: Path, id: str, entries: Sequence[Mapping[str, Any]]
) -> None:
    """This server's part of a save is complete."""
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "save": id,
        "time_s": _time_after(directory, id),
        "files": entries,
    }
    path = directory / manifest_name(_shards(store), id)
    with files.new_file(path) as descriptor:
        files.write_all(descriptor, json.dumps(manifest, indent=1).encode())


def _time_after(directory: Path, id: str) -> float:
    """Now, but later than any other save of the directory, whatever the clock did."""
    others = [save.time_s for save in saves_in(directory).values() if save.id != id]
    return max([time.time(), *(time_s + 1.0 for time_s in others)])
