"""``paceline.__version__``, read when somebody asks: importlib.metadata is not cheap."""

from __future__ import annotations

from importlib import metadata

try:
    __version__ = metadata.version("paceline")
except metadata.PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"
