"""The native core, if it was built, and why not otherwise. The only file that imports it."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import Any

NATIVE_VARIABLE = "PACELINE_DISABLE_NATIVE"
"""Leaves all of it out: gradients go over the process group, servers and hooks are Python's."""

DISABLE_VARIABLE = "PACELINE_DISABLE_SHM"
"""Leaves shared memory alone; the rest of the native core is used."""


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


_module: Any = None
if not _is_set(NATIVE_VARIABLE):
    with contextlib.suppress(ImportError):
        _module = importlib.import_module("paceline.native._native")

native: Any = _module
"""The extension module (``native/module.c``), or None: then Python does the same, slower."""

DISABLED = f"{DISABLE_VARIABLE} is set"


def missing_reason() -> str | None:
    """Say what this process lacks to share memory with others; None if nothing."""
    if sys.platform != "linux":
        return f"it needs Linux (memfd, futex), and this is {sys.platform}"
    if _is_set(DISABLE_VARIABLE):
        return DISABLED
    if _is_set(NATIVE_VARIABLE):
        return f"{NATIVE_VARIABLE} is set"
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
