"""The files of a directory of saves: how they are called, and which of them belong together.

Used by ``ps/storage/save.py``, which writes and deletes them, and ``ps/storage/load.py``, which
reads them.

[Note: which save is there]
Every save has an id, the same on all servers, that is part of all its file names; so a save never
touches the files of another. A server's manifest is the last of its files to appear, and the first
to be deleted. A save is complete when the manifests with its id list all shards of all tables. When
all servers have saved, the trainer lets them delete what is older; until then there may be several
saves in a directory, and the last *complete* one is meant. One that was interrupted is as if it had
never been.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.ps.protocol.table_spec import Shard

log = logging.getLogger("paceline.ps")

MANIFESTS = "manifest-*.json"
SAVE_ID = re.compile("[0-9a-f]{16}")
_SHARD = re.compile(r"\.(\d{4,})-of-(\d{4,})\.[0-9a-f]{16}\.safetensors")


@dataclass
class Save:
    """One save of a directory.

    Args:
        id: Its id.
        time_s: When it was made, by the clock of the last server.
        files: Of all manifests.
        manifests: One for each server that has saved.
    """

    id: str
    time_s: float = 0.0
    files: list[str] = field(default_factory=list)
    manifests: list[Path] = field(default_factory=list)

    def shards(self, table: str) -> list[str]:
        """The files of a table's shards, in their order.

        Raises:
            ValueError: Some are not listed.
        """
        found: dict[int, dict[int, str]] = {}
        for file in self.files:
            match = _SHARD.fullmatch(file.removeprefix(stem(table)))
            if match and file.startswith(stem(table)):
                found.setdefault(int(match[2]), {})[int(match[1])] = file
        if not found:
            raise ValueError(f"there is no table {table!r} in it")
        if len(found) > 1:
            raise ValueError(f"table {table!r} is there from several saves, of {sorted(found)}")
        ((count, files),) = found.items()
        missing = sorted(set(range(count)) - set(files))
        if missing:
            raise ValueError(f"table {table!r}: shard {missing[0]} of {count} is missing")
        return [files[index] for index in range(count)]


def files_of(directory: Path, tables: Sequence[str]) -> dict[str, list[Path]]:
    """For each table the files of its shards, of the last complete save.

    Raises:
        ValueError: There is none; the text says what the last one lacks.
        OSError: It cannot be read.
    """
    saves = sorted(saves_in(directory).values(), key=lambda save: save.time_s, reverse=True)
    if not saves:
        raise ValueError(f"there is no manifest ({MANIFESTS}) in it, so no save was completed")
    first: ValueError | None = None
    for save in saves:
        try:
            found = {table: save.shards(table) for table in tables}
        except ValueError as error:
            first = first or error
            continue
        if first is not None:
            log.warning("%s: a later save was not completed: %s", directory, first)
        return {table: _paths(directory, files) for table, files in found.items()}
    assert first is not None
    raise first


def _paths(directory: Path, files: Sequence[str]) -> list[Path]:
    paths = [directory / file for file in files]
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path.name} is listed in a manifest, and missing")
    return paths


def saves_in(directory: Path) -> dict[str, Save]:
    """All saves of a directory by id, complete or not.

    Raises:
        ValueError: A manifest is damaged.
        OSError: It cannot be read.
    """
    found: dict[str, Save] = {}
    for path in directory.glob(MANIFESTS):
        try:
            manifest = _read(path)
        except FileNotFoundError:  # another server has just deleted it
            continue
        save = found.setdefault(manifest["save"], Save(manifest["save"]))
        save.time_s = max(save.time_s, float(manifest["time_s"]))
        save.files += [Path(entry["file"]).name for entry in manifest["files"]]
        save.manifests.append(path)
    return found


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found["files"], list) or not isinstance(found["save"], str):
            raise ValueError("it lists no files, or is of no save")
        return dict(found)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} is damaged: {error}") from None


def stem(name: str) -> str:
    """A file name that tells the table and cannot be that of another."""
    digest = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:60] + "-" + digest


def file_name(table: str, shard: Shard, id: str) -> str:
    """Of a table's shard."""
    return f"{stem(table)}.{shard.index:04d}-of-{shard.count:04d}.{id}.safetensors"


def all_of_shard(table: str, shard: Shard) -> str:
    """A pattern for the files of a table's shard, of all saves, complete or not."""
    return f"{stem(table)}.{shard.index:04d}-of-{shard.count:04d}*"


def manifest_name(shards: Sequence[tuple[str, Shard]], id: str) -> str:
    """Of the server that has these shards."""
    text = "\n".join(f"{name} {shard.index} {shard.count}" for name, shard in shards)
    return f"manifest-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}-{id}.json"
