"""Writes files that only this user can read, whole or not at all.

Used for what lies in run folders, in the list of jobs and in the directory of an elastic job, and
for reports. Reads nothing: :mod:`paceline.observe.untrusted` does.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file to write into it; if it is new, nobody else can read it.

    PACELINE_RUN_DIR may name a folder that others can write into: a link that leads to another
    file is refused, and a pipe that nobody reads is not waited for.

    Raises:
        OSError: It cannot be written, or is a link.
    """
    safe = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, safe | flags, 0o600)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[str]]:
    """A file to write, which has its name once the block has ended without an exception.

    Nobody else can read it at any moment.

    Raises:
        OSError: The disk is full, or the folder is not writable.
    """
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            os.fchmod(descriptor, 0o600)  # the umask may take the owner's rights
            yield file
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def write_whole(path: Path, text: str) -> None:
    """The same for a text that is there.

    Raises:
        OSError: The disk is full, or the folder is not writable.
    """
    with whole_file(path) as file:
        file.write(text)
