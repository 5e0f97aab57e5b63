"""Writes what a report has to say into files. It knows nothing of their contents."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from paceline.errors import ConfigurationError
from paceline.observe.private_file import whole_file


@contextlib.contextmanager
def report_file(path: Path) -> Iterator[IO[str]]:
    """A file to write, private to this user, which appears whole or not at all.

    Raises:
        ConfigurationError: It cannot be written.
    """
    try:
        with whole_file(path) as file:
            yield file
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> ConfigurationError:
    """Return the error for a file that cannot be written."""
    return ConfigurationError(f"{path} cannot be written: {error.strerror}; choose another place")
