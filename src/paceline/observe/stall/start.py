"""The one watchdog of this process: started with the first wrapper, ended with the last.

Called by :mod:`paceline.ddp.stall_probe`.
"""

from __future__ import annotations

import atexit
import logging
import os

from paceline.observe.run_folder import RunFolder
from paceline.observe.stall.probes import probes
from paceline.observe.stall.watchdog import Watchdog

logger = logging.getLogger("paceline")

STALL_AFTER = "PACELINE_STALL_AFTER"
"""Seconds after which a wait is a stall, instead of what the watchdog has learned."""

MIN_STALL_S = 0.1

_watchdog: Watchdog | None = None
_is_registered = False


def start_watchdog(folder: RunFolder, rank: int) -> None:
    """Have this process watched, if it is not yet."""
    global _watchdog, _is_registered
    if _watchdog is not None and _watchdog.is_alive:
        return
    try:
        _watchdog = Watchdog(folder, rank, read_stall_after(os.environ.get(STALL_AFTER, "")))
    except (OSError, RuntimeError) as error:
        logger.warning("rank %d: stalls will not be reported: %s", rank, error)
        return
    if not _is_registered:
        _is_registered = True
        atexit.register(stop_watchdog)


def stop_watchdog() -> None:
    """End the watchdog of this process."""
    global _watchdog
    watchdog, _watchdog = _watchdog, None
    if watchdog is not None:
        watchdog.close()


def stop_without_probes() -> None:
    """End it if there is nothing left to look after."""
    if not probes():
        stop_watchdog()


def read_stall_after(text: str) -> float | None:
    """Translate PACELINE_STALL_AFTER; what is no number of seconds is said, and ignored."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not MIN_STALL_S <= seconds <= 1e6:
        logger.warning(
            "%s=%s is no number of seconds (%g and more); it is ignored, and the time that a wait "
            "may take is learned",
            STALL_AFTER,
            text,
            MIN_STALL_S,
        )
        return None
    return seconds
