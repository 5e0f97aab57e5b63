"""The files of a server by name, and the lock that keeps a second server away from them.

Used by ``ps/storage/durable.py``, which knows what is in them.

==================================== ============================================================
``lock``                             the process that uses the directory
``journal-N.log``                    messages since snapshot N
``snapshot-N.safetensors``           everything, of the moment when journal N began
``loaded-N-TOKEN.safetensors``       rows that journal N says were loaded
``staged-TOKEN.safetensors``         rows that are ready to be loaded
``*.partial``                        one of these that is being written
==================================== ============================================================
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import ServerStartError
from paceline.ps.storage import files

_LOCK_S = 2.0  # a forked child of a killed server lets go of the lock within a moment
_NAME = re.compile(r"(journal|snapshot|loaded)-(\d{8,})(?:-[0-9a-f]{16})?\.(?:log|safetensors)")
STAGED = "staged-*.safetensors"
SNAPSHOTS_IN_WORK = f"snapshot-*{files.TEMPORARY}"
ALL_IN_WORK = f"*{files.TEMPORARY}"


class Directory:
    """One server's.

    Args:
        path: Made if it is not there. One server at a time.

    Raises:
        ServerStartError: Another server uses it, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            files.make_directories(path)
            self._lock = _locked(path)
        except OSError as error:
            raise ServerStartError(f"the directory {path} cannot be used: {error}") from None

    def close(self) -> None:
        """Let another server have it."""
        os.close(self._lock)

    def journal(self, number: int) -> Path:
        """Which follows the snapshot of this number."""
        return self._path / f"journal-{number:08d}.log"

    def snapshot(self, number: int) -> Path:
        """Of the moment when the journal of this number began."""
        return self._path / f"snapshot-{number:08d}.safetensors"

    def loaded(self, number: int, token: str) -> Path:
        """Named in the journal of this number."""
        return self._path / f"loaded-{number:08d}-{token}.safetensors"

    def staged(self, token: str) -> Path:
        """Not part of the state yet."""
        return self._path / STAGED.replace("*", token)

    def named(self, name: str) -> Path:
        """A file by the name that a journal gives it."""
        return self._path / Path(name).name

    def numbered(self, kind: str) -> dict[int, Path]:
        """All journals, or all snapshots."""
        return {number: path for found, number, path in self._numbered() if found == kind}

    def older(self, than: int) -> list[Path]:
        """What a snapshot of this number makes superfluous."""
        return [path for _, number, path in self._numbered() if number < than]

    def delete(self, pattern: str) -> None:
        """Delete what is of no use any more."""
        for path in self._path.glob(pattern):
            files.disk.unlink(path)

    def _numbered(self) -> Iterator[tuple[str, int, Path]]:
        for path in sorted(self._path.iterdir()):
            if match := _NAME.fullmatch(path.name):
                yield match[1], int(match[2]), path


def _locked(directory: Path) -> int:
    """Lock the directory for as long as the descriptor is open.

    Raises:
        ServerStartError: Somebody else has it.
    """
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until_s = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until_s:
                holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
                os.close(descriptor)
                raise ServerStartError(
                    f"the directory {directory} is in use by another server (process {holder})"
                ) from None
            time.sleep(0.02)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor
