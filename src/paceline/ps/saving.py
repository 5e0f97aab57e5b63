"""SAVE and LOAD: tables in a directory that any number of servers can read again.

Called by ``ps/server.py``. Each server writes one file for each table's shard that it has (ids,
rows, optimizer state) and a part of the manifest, which is the last to appear. Loading reads the
files of *all* shards and takes what is owned here, so servers may be more, fewer or cut otherwise.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.errors import ConfigurationError
from paceline.ps.refusal import Code, Refusal
from paceline.ps.sharding import is_owner
from paceline.ps.snapshot import describe, parse, read_table, table_tensors
from paceline.ps.spec import Shard, Sharding, TableSpec
from paceline.ps.store import Store
from paceline.ps.table import Table
from paceline.ps.tensor_file import TensorFile, open_tensors, sync_directory, write_tensors

FORMAT = "paceline-ps-table"
VERSION = "1"
MANIFEST = "manifest-*.json"


class SavePlace:
    """Decides which directories a client may name.

    Args:
        root: Only below this one.
        is_open: Without a root: any (ipc, where clients are the same user) or none (tcp).
    """

    def __init__(self, root: Path | None, is_open: bool) -> None:
        self._root = None if root is None else root.resolve()
        self._is_open = is_open

    def directory(self, control: Mapping[str, Any], code: Code) -> Path:
        """The directory a message names.

        Raises:
            Refusal: It is none, or not allowed.
        """
        text = control.get("path")
        if not isinstance(text, str) or not text or len(text) > 4096 or "\0" in text:
            raise Refusal(code, "a message to save or load names its directory as `path`")
        if self._root is None and not self._is_open:
            raise Refusal(code, "this server has no --save-root, so it neither saves nor loads")
        if self._root is None:
            path = Path(text)
            if not path.is_absolute():
                raise Refusal(code, f"{text!r} is no absolute path, and a server has its own place")
            return path
        path = (self._root / text).resolve()
        if not path.is_relative_to(self._root):
            raise Refusal(code, f"{text!r} is not below this server's --save-root")
        return path


def save_job(store: Store, directory: Path) -> Callable[[], dict[str, Any]]:
    """What a forked child does to save all tables: returns the names of the files."""

    def work() -> dict[str, Any]:
        directory.mkdir(parents=True, exist_ok=True)
        files = []
        for table in store.tables:
            path = directory / _file_name(table.spec, table.shard)
            metadata = {"format": FORMAT, "version": VERSION, "table": json.dumps(describe(table))}
            size = write_tensors(path, table_tensors(table) or _nothing(table), metadata)
            files.append({"file": path.name, "rows": table.count, "bytes": size})
        _write_manifest(directory, files)
        return {"files": [entry["file"] for entry in files]}

    return work


def prepare_load(store: Store, directory: Path) -> Callable[[], dict[str, Any]]:
    """Check all files that a LOAD needs; returns what replaces the tables' rows.

    Raises:
        Refusal: A file is missing, damaged, or does not fit a table.
    """
    try:
        chosen = {table.number: _shards_of(directory, table) for table in store.tables}
    except (OSError, ValueError, KeyError, TypeError, ConfigurationError) as error:
        raise Refusal(Code.LOAD, f"{directory} cannot be loaded: {error}") from None

    def change() -> dict[str, Any]:
        rows = {}
        for table in store.tables:
            table.clear()
            for path in chosen[table.number]:
                with open_tensors(path) as file:
                    _adopt(table, file)
            rows[table.spec.name] = table.count
        return {"rows": sum(rows.values())}

    return change


def _adopt(table: Table, file: TensorFile) -> None:
    _, _, step = parse(json.loads(file.metadata["table"]))
    table.step = max(table.step, step)
    for ids, rows, state in read_table(file, "", table):
        mine = torch.from_numpy(_owned(table, ids.numpy()))
        if mine.any():
            table.adopt(ids[mine].numpy(), rows[mine], tuple(column[mine] for column in state))


def _owned(table: Table, ids: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < table.spec.rows:
        raise ValueError(f"table {table.spec.name!r} has ids out of range")
    return is_owner(table.shard, table.spec.rows, ids)


def _shards_of(directory: Path, table: Table) -> list[Path]:
    """The files of all shards of a table, each checked."""
    found: dict[tuple[Sharding, int], dict[int, Path]] = {}
    for path in directory.glob(f"{_stem(table.spec.name)}.*.safetensors"):
        with open_tensors(path) as file:
            shard = _check_file(file, table)
        found.setdefault((shard.sharding, shard.count), {})[shard.index] = path
    if len(found) > 1:
        raise ValueError(
            f"table {table.spec.name!r} is there from several saves: {sorted(map(str, found))}"
        )
    for (_, count), paths in found.items():
        missing = sorted(set(range(count)) - set(paths))
        if missing:
            raise ValueError(f"table {table.spec.name!r}: shard {missing[0]} of {count} is missing")
        return [paths[index] for index in range(count)]
    raise ValueError(f"there is no table {table.spec.name!r} in it")


def _check_file(file: TensorFile, table: Table) -> Shard:
    metadata = file.metadata
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{file.path.name} is no table of a Paceline server")
    if metadata.get("version") != VERSION:
        raise ValueError(f"{file.path.name} is of version {metadata.get('version')}")
    spec, shard, _ = parse(json.loads(metadata["table"]))
    wanted, there = _essence(table.spec), _essence(spec)
    if wanted != there:
        raise ValueError(f"table {spec.name!r} was saved as {there}, and is {wanted} here")
    next(iter(read_table(file, "", table)), None)  # shapes
    return shard


def _essence(spec: TableSpec) -> tuple[object, ...]:
    """What must be the same for rows to be taken over; lr and first values may differ."""
    return spec.name, spec.rows, spec.dim, spec.dtype.name, type(spec.optimizer).__name__


def _nothing(table: Table) -> dict[str, torch.Tensor]:
    """A table without rows is saved too, with arrays of length 0."""
    state = {
        f"state.{column.name}": torch.empty((0, column.width), dtype=column.dtype)
        for column in table.columns
    }
    rows = torch.empty((0, table.spec.dim), dtype=table.dtype)
    return {"ids": torch.empty(0, dtype=torch.int64), "rows": rows, **state}


def _stem(name: str) -> str:
    """A file name that tells the table and cannot be that of another."""
    digest = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:60] + "-" + digest


def _file_name(spec: TableSpec, shard: Shard) -> str:
    return f"{_stem(spec.name)}.{shard.index:04d}-of-{shard.count:04d}.safetensors"


def _write_manifest(directory: Path, files: list[dict[str, Any]]) -> None:
    """This server's part: which files are complete. Another save by it replaces it."""
    names = "\n".join(entry["file"] for entry in files)
    part = hashlib.blake2b(names.encode(), digest_size=6).hexdigest()
    path = directory / MANIFEST.replace("*", part)
    temporary = path.with_suffix(".partial")
    manifest = {"format": FORMAT, "version": VERSION, "files": files}
    temporary.write_text(json.dumps(manifest, indent=1))
    temporary.rename(path)
    sync_directory(directory)
