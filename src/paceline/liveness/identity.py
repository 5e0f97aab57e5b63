"""What a rank tells the others about its process: enough to see later whether it still lives.

Pure except for :func:`describe_process` and :func:`host_key`, which ask the system.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from paceline.processes import boot_id, host_name, namespace_id, start_ticks

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class RankProcess:
    """What ranks tell each other about their processes. Travels as JSON.

    Attributes:
        rank: In the group.
        host: Equal for processes that see each other's pids.
        hostname: For people.
        pid: In its PID namespace, which is part of ``host``.
    """

    rank: int
    host: str
    hostname: str
    pid: int

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any, rank: int) -> Self:
        """Check what a peer sent.

        Raises:
            ValueError: If it describes no process, or that of another rank.
        """
        kinds: dict[Any, type] = {"int": int, "str": str}
        try:
            found = cls(**{each.name: kinds[each.type](value[each.name]) for each in fields(cls)})
        except (KeyError, TypeError) as error:
            raise ValueError(f"rank {rank} sent no description of itself: {value!r}") from error
        if found.rank != rank:
            raise ValueError(f"rank {rank} says that it is rank {found.rank}")
        return found

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.hostname})"


@dataclass(frozen=True)
class Identity(RankProcess):
    """One rank's process, for good.

    Attributes:
        started: When the process began, in ticks since the machine did.
    """

    started: int


def describe_process(rank: int) -> Identity:
    """Say who and where this process is."""
    return Identity(rank, host_key(), host_name(), os.getpid(), start_ticks(os.getpid()))


def host_key() -> str:
    """Name what must be equal for two processes to map each other's memory.

    The same boot of the same kernel, the same user, and namespaces in which the other's socket and
    process can be seen. ``PACELINE_HOST_ID`` stands in for the boot.
    """
    # Without a boot id nobody is on the same host as this rank.
    boot = boot_id() or secrets.token_hex(16)
    return "|".join((boot, str(os.geteuid()), namespace_id("net"), namespace_id("pid")))
