"""A server's directory: lock, journals, snapshots, and how a store comes back from them.

Called by ``ps/process.py`` (start, end), ``ps/handler.py`` (each change) and ``ps/server.py`` (each
snapshot). Journal N follows snapshot N; a new server begins with journal 0. A snapshot begins
journal N+1 first and is written by a forked child, so it is of the moment between the two journals;
when it has its name, everything older is deleted. A start takes the newest snapshot and all
journals from its number on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import ServerStartError, ServerStateError
from paceline.ps.clients import Admission
from paceline.ps.faults import Place, reach
from paceline.ps.journal import Journal, read_journal
from paceline.ps.refusal import Refusal
from paceline.ps.snapshot import read_snapshot, write_snapshot
from paceline.ps.store import Store
from paceline.ps.tensor_file import TEMPORARY
from paceline.ps.wire import Frame, Head, WireError, pack_head, read_head

log = logging.getLogger("paceline.ps")

_LOCK_S = 2.0  # a forked child of a killed server lets go of the lock within a moment
_NAME = re.compile(r"(journal|snapshot)-(\d{8,})\.(?:log|safetensors)")


class Durable:
    """The directory of a running server.

    Args:
        directory: Made if it is not there. One server at a time.
        store: Empty; is filled with what is on disk.
        fsync: See ``Journal``.

    Raises:
        ServerStartError: Another server uses the directory, or it cannot be written.
        ServerStateError: What is in it cannot be read.
    """

    def __init__(self, directory: Path, store: Store, fsync: bool) -> None:
        self._directory = directory
        self._store = store
        self._fsync = fsync
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _locked(directory)
        except OSError as error:
            raise ServerStartError(f"the directory {directory} cannot be used: {error}") from None
        try:
            self._number, records = self._recover()
            self._journal = self._open_journal()
            self._journal.records = records
        except OSError as error:
            os.close(self._lock)
            raise ServerStateError(f"the files in {directory} cannot be used: {error}") from error
        except BaseException:
            os.close(self._lock)
            raise

    def append(self, frames: Sequence[Frame]) -> None:
        """Journal a message that will be applied. Not synced yet.

        Raises:
            ServerStateError: The disk does not take it: the server cannot keep its promise.
        """
        try:
            self._journal.append(frames)
        except OSError as error:
            raise ServerStateError(
                f"{self._journal.path} cannot be written: {error}. The server ends, with every "
                "push it acknowledged on disk; make room and start it again, and trainers go on"
            ) from error

    def append_refused(self, head: Head, refusal: Refusal) -> None:
        """Journal that a message was refused."""
        self.append([pack_head(head), json.dumps(refusal.to_json()).encode()])

    def sync(self) -> None:
        """Before acknowledgements go out."""
        self._journal.sync()

    def begin_snapshot(self) -> Callable[[], None]:
        """Begin the next journal; returns what a forked child has to do."""
        self._number += 1
        self._journal.close()
        self._journal = self._open_journal()
        reach(Place.ROTATED)
        path = self._path("snapshot", self._number)
        return lambda: _write_and_tell(path, self._store)

    @property
    def has_changed(self) -> bool:
        """Say whether there is anything since the last snapshot."""
        return self._journal.records > 0

    def end_snapshot(self) -> None:
        """A snapshot has its name: delete what is older. Idempotent."""
        reach(Place.CLEANING)
        newest = max(number for kind, number, _ in self._files() if kind == "snapshot")
        for kind, number, path in self._files():
            if number < newest:
                path.unlink(missing_ok=True)
                log.debug("deleted %s %d", kind, number)

    def snapshot_now(self) -> None:
        """Write a snapshot in this process, and wait for it.

        Raises:
            OSError: The disk does not want to; journals are kept.
        """
        self.begin_snapshot()()
        self.end_snapshot()

    def close(self) -> None:
        """Take a last snapshot, and let the directory go."""
        try:
            if self.has_changed:
                self.snapshot_now()
        except OSError as error:
            log.warning("no last snapshot, the next start replays the journal: %s", error)
        finally:
            self._journal.close()
            os.close(self._lock)

    def _recover(self) -> tuple[int, int]:
        """Fill the store; returns the number of the journal to go on with, and what it holds."""
        start_s = time.monotonic()
        for leftover in self._directory.glob(f"*{TEMPORARY}"):
            leftover.unlink()
        snapshots = {number: path for kind, number, path in self._files() if kind == "snapshot"}
        journals = {number: path for kind, number, path in self._files() if kind == "journal"}
        base = max(snapshots, default=0)
        if snapshots:
            read_snapshot(snapshots[base], self._store)
        last = max(journals, default=base)
        replayed = 0
        for number in range(base, last + 1):
            if number not in journals and last > base:
                raise ServerStateError(
                    f"{self._path('journal', number)} is missing, and there are later journals; "
                    "put it back, or move the later ones away to go back to that moment"
                )
            if number in journals:
                replayed += self._replay(journals[number], number, is_last=number == last)
        self._store.forget_traffic()  # what was replayed is none
        rows = sum(table.count for table in self._store.tables)
        if snapshots or replayed:
            took_s = time.monotonic() - start_s
            log.info("recovered %d rows, %d messages replayed, %.2f s", rows, replayed, took_s)
        return last, replayed

    def _replay(self, path: Path, number: int, is_last: bool) -> int:
        count = 0
        for frames in read_journal(path, number, is_last):
            count += 1
            try:
                self._replay_one(frames)
            except (WireError, ValueError, KeyError) as error:
                raise ServerStateError(f"record {count} of {path} is no message: {error}") from None
            except Refusal as refusal:
                raise ServerStateError(
                    f"record {count} of {path} cannot be applied any more: {refusal.text}"
                ) from None
        return count

    def _replay_one(self, frames: Sequence[Frame]) -> None:
        if len(frames) == 2:  # refused: a head and why
            head, _ = read_head(frames[0])
            self._store.clients.count(head, Refusal.from_json(json.loads(bytes(frames[1]))))
            return
        message = self._store.read(frames)
        if isinstance(message, list):
            raise ValueError("a LOOKUP changes nothing")
        if self._store.admit(message.head) is not Admission.NEW:
            raise ValueError(f"number {message.head.sequence} is there twice")
        change = self._store.prepare(message)
        with contextlib.suppress(Refusal):  # it failed at the same place before the restart
            self._store.commit(message.head, change)

    def _open_journal(self) -> Journal:
        return Journal(self._path("journal", self._number), self._number, self._fsync)

    def _path(self, kind: str, number: int) -> Path:
        ending = "log" if kind == "journal" else "safetensors"
        return self._directory / f"{kind}-{number:08d}.{ending}"

    def _files(self) -> list[tuple[str, int, Path]]:
        return [
            (match[1], int(match[2]), path)
            for path in sorted(self._directory.iterdir())
            if (match := _NAME.fullmatch(path.name))
        ]


def _write_and_tell(path: Path, store: Store) -> None:
    write_snapshot(path, store)
    reach(Place.RENAMED)


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
