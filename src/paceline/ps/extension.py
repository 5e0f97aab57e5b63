"""The native core of the parameter servers, if it was built. The only file that imports it."""

from __future__ import annotations

import importlib
import os
from typing import Any

DISABLE_VARIABLE = "PACELINE_DISABLE_PS_NATIVE"

_module: Any = None
if os.environ.get(DISABLE_VARIABLE, "") in ("", "0"):
    try:
        _module = importlib.import_module("paceline.ps._native")
    except ImportError:
        _module = None

native: Any = _module
"""The extension module (``native/module.c``), or None: then Python does the same, slower."""
