"""Starts the process that ranks are forked from, so that it does not mind Ctrl-C.

Called by the commands that run ranks, before anything else: it imports torch meanwhile.
"""

from __future__ import annotations

import signal


def start_fork_server() -> None:
    """Start it if there is none. It inherits that Ctrl-C is ignored, else it prints a traceback."""
    from paceline.testing import warm_up

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        warm_up()
    finally:
        signal.signal(signal.SIGINT, before)
