"""The native core, if it was built, and why not otherwise. The only file that imports it."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

try:
    _module = importlib.import_module("paceline.shm._native")
except ImportError:
    _module = None  # type: ignore[assignment]

native: Any = _module
"""The extension module (``native/module.c``), or None."""

DISABLE_VARIABLE = "PACELINE_DISABLE_SHM"
DISABLED = f"{DISABLE_VARIABLE} is set"


def missing_reason() -> str | None:
    """Say what this process lacks to share memory with others; None if nothing."""
    if sys.platform != "linux":
        return f"it needs Linux (memfd, futex), and this is {sys.platform}"
    if os.environ.get(DISABLE_VARIABLE, "") not in ("", "0"):
        return DISABLED
    if native is None:
        return (
            "the native core is not there, because the package was installed without a C compiler; "
            "install gcc and Python's headers, then reinstall paceline"
        )
    if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
        return "this Python was built on a system without pidfd_open or memfd_create"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"the system refuses pidfd_open ({error}); Linux 5.3 has it"
    return None
