"""How a process ended, in words; and how a forked child ends itself quickly.

Used by whatever starts processes: ``launch``, ``elastic``, ``ps/launch`` and ``testing``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from multiprocessing import util
from typing import NoReturn


def exit_summary(exit_code: int) -> str:
    """Say in words what a process's exit code means."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def leave(code: int) -> NoReturn:
    """End this process after its finalizers and threads; to take torch down takes half a second."""
    util._exit_function()  # type: ignore[attr-defined]
    threading._shutdown()  # type: ignore[attr-defined]
    flush()
    os._exit(code)


def flush() -> None:
    """Write out what was printed; nobody to read it is no error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
