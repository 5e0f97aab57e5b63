"""Work for a forked child: it sees all tables as they are now, and the server goes on.

Called by ``ps/server/loop.py`` for snapshots and saves, one at a time. The child shares the
parent's pages until one of them writes (copy on write), has none of its sockets, locks or pipes,
and ends with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

from paceline.launch.kernel import die_with_parent

log = logging.getLogger("paceline.ps")


class ForkedJob:
    """One child at work.

    Args:
        work: Called in the child; what it returns must be JSON.

    Raises:
        OSError: There is no further process or pipe to be had.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._reader, writer = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Newer Pythons warn of threads: ZeroMQ's are the only ones, and the child never comes
            # near them.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self._pid = os.fork()
            except OSError:
                os.close(self._reader)
                os.close(writer)
                raise
        if self._pid == 0:
            _be_child(work, writer, parent)
        os.close(writer)

    def fileno(self) -> int:
        """Has something to read when the child is done or dead."""
        return self._reader

    def finish(self) -> Any:
        """Wait for the child and return what it returned.

        Raises:
            OSError: It failed; the text says why.
        """
        with os.fdopen(self._reader, "rb") as reader:
            text = reader.read()
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        try:
            found = json.loads(text)
        except ValueError:
            raise OSError(f"the writing process ended with {status}") from None
        if "error" in found:
            raise OSError(found["error"])
        return found["value"]

    def cancel(self) -> None:
        """Kill the child; half-written files are cleared away at the next start."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.close(self._reader)
        os.waitpid(self._pid, 0)


class FailedJob(ForkedJob):
    """One whose child could not even be made."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def finish(self) -> Any:
        """Say why."""
        raise self._error


def _be_child(work: Callable[[], Any], writer: int, parent: int) -> None:
    """Work, report, end. Does not return, and does not clean up what is the parent's."""
    try:
        os.closerange(3, writer)
        os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
        die_with_parent(parent)  # a half-written snapshot is of no use to anybody
        try:
            words = {"value": work()}
        except Exception as error:
            words = {"error": f"{type(error).__name__}: {error}"}
        os.write(writer, json.dumps(words).encode())
    finally:
        os._exit(0)
