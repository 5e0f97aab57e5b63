"""Writes what a report has to say into files. It knows nothing of their contents."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from paceline.errors import ConfigurationError


def write_whole(path: Path, fill: Callable[[IO[str]], object]) -> None:
    """Write a file, private to this user, whole or not at all.

    Raises:
        ConfigurationError: It cannot be written.
    """
    try:
        descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            fill(file)
        os.replace(draft, path)
    except BaseException as error:
        Path(draft).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cannot_write(path, error) from error
        raise


def cannot_write(path: Path, error: OSError) -> ConfigurationError:
    """Return the error for a file that cannot be written."""
    return ConfigurationError(f"{path} cannot be written: {error.strerror}; choose another place")
