"""What a server keeps in its directory, and how a store comes back from it.

Called by ``ps/server/process.py`` (start, end), ``ps/server/dispatch.py`` (each change) and
``ps/server/loop.py`` (each snapshot). Journal N follows snapshot N; a new server begins with
journal 0. A snapshot begins journal N+1 first and is written by a forked child, so it is of the
moment between the two journals; when it has its name, everything older is deleted. A start takes
the newest snapshot and all journals from its number on. Rows that are loaded come as a file of
their own, named in journal N and deleted with it; see [Note: why a load cannot be half done] in
``ps/storage/load.py``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import ServerStateError
from paceline.ps.protocol.wire import (
    SEQUENCED,
    Frame,
    Head,
    Kind,
    Message,
    WireError,
    pack_control,
    pack_head,
    read_head,
    unpack,
)
from paceline.ps.state.clients import Admission
from paceline.ps.state.refusal import Refusal
from paceline.ps.state.store import Store
from paceline.ps.storage import files
from paceline.ps.storage.directory import ALL_IN_WORK, SNAPSHOTS_IN_WORK, STAGED, Directory
from paceline.ps.storage.faults import FaultPoint, reach
from paceline.ps.storage.journal import Journal, has_records, read_journal
from paceline.ps.storage.load import Part, is_for, read_loaded, write_loaded
from paceline.ps.storage.snapshot import read_snapshot, write_snapshot

log = logging.getLogger("paceline.ps")


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
        self._directory = Directory(directory)
        self._store = store
        self._fsync = fsync
        try:
            self._number, records = self._recover()
            self._journal = self._open_journal(self._number)
            self._journal.records = records
        except OSError as error:
            self._directory.close()
            raise ServerStateError(f"the files in {directory} cannot be used: {error}") from error
        except BaseException:
            self._directory.close()
            raise

    def append(self, frames: Sequence[Frame]) -> None:
        """Journal a message that will be applied. Not synced yet.

        Raises:
            ServerStateError: The disk does not take it: the server cannot keep its promise.
        """
        try:
            self._journal.append(frames)
        except OSError as error:
            raise self._cannot_write(error) from error

    def append_checked(self, frames: Sequence[Frame]) -> None:
        """Journal a message that was checked, and is applied next; see ``append``."""
        reach(FaultPoint.CHECKED)
        self.append(frames)
        reach(FaultPoint.APPENDED)

    def append_refused(self, head: Head, refusal: Refusal) -> None:
        """Journal that a message was refused."""
        self.append([pack_head(head), json.dumps(refusal.to_json()).encode()])

    def sync(self) -> None:
        """Before acknowledgements go out.

        Raises:
            ServerStateError: The disk does not take what was written.
        """
        try:
            self._journal.sync()
        except OSError as error:
            self._journal.is_broken = True
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> ServerStateError:
        return ServerStateError(
            f"{self._journal.path} cannot be written: {error}. The server ends, with every "
            "push it acknowledged on disk; make room and start it again, and trainers go on"
        )

    def stage(self, token: str, parts: Sequence[Part]) -> int:
        """Have a file ready that ``take_staged`` knows by its token. Called in a forked child.

        Raises:
            OSError: The disk does not want to.
        """
        self._directory.delete(STAGED)  # one is enough: others were forgotten
        return write_loaded(self._directory.staged(token), parts)

    def forget_staged(self, token: str) -> None:
        """Nobody wants it any more."""
        files.discard(self._directory.staged(token))

    def take_staged(self, token: str) -> Path | None:
        """A file to load that is there already and fits, or None.

        Raises:
            OSError: The disk does not want to.
        """
        staged = self._directory.staged(token)
        try:
            if not is_for(staged, self._store):
                return None
        except (FileNotFoundError, ValueError) as error:
            log.warning("a load begins anew: %s", error)
            return None
        path = self._directory.loaded(self._number, token)
        files.replace(staged, path)
        return path

    def write_loaded(self, parts: Sequence[Part]) -> Path:
        """Make a file to load.

        Raises:
            OSError: The disk does not want to.
        """
        path = self._directory.loaded(self._number, secrets.token_hex(8))
        write_loaded(path, parts)
        return path

    def load(self, head: Head, path: Path) -> int:
        """Make a file part of the state, and replace all rows by it; returns how many they are.

        Raises:
            ServerStateError: The server cannot go on, and has lost nothing.
        """
        reach(FaultPoint.LOADED)
        self.append(pack_control(head, {"loaded": path.name}))
        return self._read_loaded(head, path)

    def _read_loaded(self, head: Head, path: Path) -> int:
        try:
            rows = read_loaded(path, self._store)
        except (OSError, ValueError, KeyError, TypeError, MemoryError, Refusal) as error:
            raise ServerStateError(
                f"{path}, whose rows were loaded, cannot be read: {error}. The server ends; when "
                "the file can be read again, start it again"
            ) from error
        self._store.clients.count(head, None)
        return rows

    def begin_snapshot(self) -> Callable[[], None]:
        """Begin the next journal; returns what a forked child has to do.

        Raises:
            OSError: There is no next journal, and the one that is there goes on.
        """
        self._directory.delete(SNAPSHOTS_IN_WORK)  # of a child that was killed
        number = self._number + 1
        journal = self._open_journal(number)
        self._journal.close()
        self._number, self._journal = number, journal
        reach(FaultPoint.ROTATED)
        path = self._directory.snapshot(number)
        return lambda: _write_and_tell(path, self._store)

    @property
    def has_changed(self) -> bool:
        """Say whether there is anything since the last snapshot."""
        return self._journal.records > 0

    def end_snapshot(self) -> None:
        """A snapshot has its name: delete what is older. Idempotent."""
        reach(FaultPoint.CLEANING)
        self._delete_older(max(self._directory.numbered("snapshot")))

    def _delete_older(self, than: int) -> None:
        for path in self._directory.older(than):
            try:
                files.disk.unlink(path)
                log.debug("deleted %s", path)
            except OSError as error:
                log.warning("%s is not needed any more, and cannot be deleted: %s", path, error)

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
            if self.has_changed and not self._journal.is_broken:
                self.snapshot_now()
        except OSError as error:
            log.warning("no last snapshot, the next start replays the journal: %s", error)
        finally:
            with contextlib.suppress(OSError):  # else the next start does it
                self._directory.delete(STAGED)
            self._journal.close()
            self._directory.close()

    def _recover(self) -> tuple[int, int]:
        """Fill the store; returns the number of the journal to go on with, and what it holds."""
        start_s = time.monotonic()
        for pattern in (ALL_IN_WORK, STAGED):
            self._directory.delete(pattern)
        snapshots = self._directory.numbered("snapshot")
        journals = self._directory.numbered("journal")
        base = max(snapshots, default=0)
        if snapshots:
            read_snapshot(snapshots[base], self._store)
        last = max(journals, default=base)
        written = max((number for number in journals if has_records(journals[number])), default=0)
        replayed = 0
        for number in range(base, last + 1):
            if number not in journals and last > base:
                raise ServerStateError(
                    f"{self._directory.journal(number)} is missing, and there are later journals; "
                    "put it back, or move the later ones away to go back to that moment"
                )
            if number in journals:
                replayed += self._replay(journals[number], number, may_be_torn=number >= written)
        self._store.forget_traffic()  # what was replayed is none
        self._delete_older(base)  # if the last server was killed before it did
        rows = sum(table.count for table in self._store.tables)
        if snapshots or replayed:
            took_s = time.monotonic() - start_s
            log.info("recovered %d rows, %d messages replayed, %.2f s", rows, replayed, took_s)
        return last, replayed

    def _replay(self, path: Path, number: int, may_be_torn: bool) -> int:
        count = 0
        for frames in read_journal(path, number, may_be_torn):
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
        head, _ = read_head(frames[0])
        if head.kind not in SEQUENCED:
            raise ValueError(f"{head.kind.name} changes nothing")
        if self._store.answer_native(frames, None) is not None:
            return
        message = unpack(frames)
        if self._store.clients.admit(head) is not Admission.NEW:
            raise ValueError(f"number {head.sequence} is there twice")
        if head.kind is Kind.LOAD:
            self._replay_load(message)
            return
        change = self._store.prepare(message)
        with contextlib.suppress(Refusal):  # it failed at the same place before the restart
            self._store.commit(message.head, change)

    def _replay_load(self, message: Message) -> None:
        path = self._directory.named(message.control["loaded"])
        try:
            is_right = is_for(path, self._store)
        except (OSError, ValueError, KeyError) as error:
            raise ServerStateError(
                f"{path} was loaded before this server was started, and cannot be read: {error}; "
                "put it back"
            ) from error
        if not is_right:
            raise ServerStateError(f"{path} is of other tables: files were renamed")
        self._read_loaded(message.head, path)

    def _open_journal(self, number: int) -> Journal:
        return Journal(self._directory.journal(number), number, self._fsync)


def _write_and_tell(path: Path, store: Store) -> None:
    write_snapshot(path, store)
    reach(FaultPoint.RENAMED)
