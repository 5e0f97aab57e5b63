"""Which processes the launchers of a job have started: all that is known of a silent rank.

Written by ``paceline run``, a file for each host; read by ``paceline doctor``. A rank that hangs
before it has a wrapper, for example in ``init_process_group``, has recorded nothing.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass

from paceline.observe.private_file import write_whole
from paceline.observe.run_folder import RunFolder
from paceline.processes import (
    ProcessState,
    host_name,
    process_space,
    process_state,
    start_ticks,
)


@dataclass(frozen=True)
class LaunchedRank:
    """A process that was started as a rank.

    Attributes:
        rank: In the whole job.
        pid: The process.
        started: When it began, in ticks: with the pid it names one process for good.
        host: Its name.
        space: Equal for processes that see each other's pids.
    """

    rank: int
    pid: int
    started: int
    host: str
    space: str

    @property
    def state(self) -> ProcessState:
        """What became of it, as far as can be seen from here."""
        if self.space != process_space():
            return ProcessState.UNKNOWN
        return process_state(self.pid, self.started)


class LaunchedFile:
    """Says which process each rank of a host is, once all of them have one."""

    def __init__(self, folder: RunFolder, host: int) -> None:
        self._path = folder.launched(host)
        self._pids: dict[int, int] = {}

    def note(self, rank: int, pid: int, ranks: int) -> None:
        """One more of so many ranks has a process. A file that cannot be written costs nothing."""
        self._pids[rank] = pid
        if len(self._pids) < ranks:
            return
        found = [
            asdict(LaunchedRank(rank, pid, start_ticks(pid), host_name(), process_space()))
            for rank, pid in sorted(self._pids.items())
        ]
        with contextlib.suppress(OSError):
            write_whole(self._path, json.dumps(found))


def read_launched(folder: RunFolder) -> list[LaunchedRank]:
    """Return the ranks of all hosts in order; files that make no sense are left out."""
    found = []
    for path in folder.path.glob("host*.pids"):
        try:
            for each in json.loads(path.read_text()):
                rank, pid, started = (int(each[name]) for name in ("rank", "pid", "started"))
                found.append(
                    LaunchedRank(rank, pid, started, str(each["host"]), str(each["space"]))
                )
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda each: each.rank)
