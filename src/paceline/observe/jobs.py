"""This user's running jobs: one small file for each, for ``paceline doctor``.

Written by ``paceline run``, read by whoever wants a list. The directory is private to the user, and
used only if it is: others could put entries into one that is not. An entry whose launcher is gone
is removed by the next reader.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import ConfigurationError
from paceline.observe.private_file import write_whole
from paceline.observe.untrusted import MAKES_NO_SENSE, read_fields
from paceline.processes import start_ticks


@dataclass(frozen=True)
class ListedJob:
    """A job of this user on this host.

    Attributes:
        pid: Of its launcher.
        start_time: Of that process, in the kernel's ticks since boot: pids are used again.
        folder: Its run folder.
        command: The script and its arguments.
    """

    pid: int
    start_time: int
    folder: str
    command: tuple[str, ...]

    def is_running(self) -> bool:
        """Say whether its launcher is there."""
        return start_ticks(self.pid) == self.start_time


def registry() -> Path:
    """The directory of entries, made if need be.

    Raises:
        ConfigurationError: It belongs to somebody else, or cannot be made.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(runtime) / "paceline" if runtime else Path(tempfile.gettempdir())
    if not runtime:
        path = path / f"paceline-{os.getuid()}"
    path = path / "jobs"
    try:
        for each in (path.parent, path):
            with contextlib.suppress(FileExistsError):
                each.mkdir(mode=0o700)
            _check_private(each)
    except OSError as error:
        raise ConfigurationError(
            f"the list of jobs {path} cannot be made: {error.strerror}"
        ) from error
    return path


def _check_private(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigurationError(f"{path} is not a directory of this user: it is not used")
    if found.st_mode & 0o077:
        path.chmod(0o700)


@contextlib.contextmanager
def listed_job(folder: Path, command: Sequence[str]) -> Iterator[ListedJob]:
    """Be in the list meanwhile. A list that cannot be written is no reason not to train."""
    pid = os.getpid()
    job = ListedJob(pid, start_ticks(pid), str(folder.absolute()), tuple(command))
    entry: Path | None = None
    with contextlib.suppress(OSError, ConfigurationError):
        entry = registry() / f"{pid}.json"
        write_whole(entry, json.dumps(asdict(job)))
    try:
        yield job
    finally:
        if entry is not None:
            entry.unlink(missing_ok=True)


def running_jobs() -> list[ListedJob]:
    """This user's jobs on this host, the oldest first; what is over is removed.

    Raises:
        ConfigurationError: The list belongs to somebody else.
    """
    found = []
    for path in registry().glob("*.json"):
        job = _read(path)
        if job is not None and job.is_running():
            found.append(job)
        else:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda job: job.start_time)


def _read(path: Path) -> ListedJob | None:
    """None for what is none: half written, or of another version."""
    try:
        return read_fields(path, ListedJob)
    except MAKES_NO_SENSE:
        return None
