"""What layers above know of a stall: asked when there is one, never before.

The wrapper registers a probe (:mod:`paceline.ddp.stall_probe`). Must not know wrappers or groups.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class InCollective:
    """A collective that a thread is inside of.

    Attributes:
        call: For people.
        place: Where the user's code called it.
        is_waiting: The thread does nothing but wait for other ranks.
    """

    call: str
    place: str
    is_waiting: bool


class Probe(Protocol):
    """One wrapper's knowledge. Called from the watchdog's thread; must not wait for anybody."""

    thread: int
    """The thread that trains."""

    @property
    def is_alive(self) -> bool:
        """Whether the wrapper is still there."""

    def name_module(self, module: Any) -> str | None:
        """Return the name that a module has in the wrapper, if it is in there."""

    def awaited(self) -> str:
        """Return what the step under way waits for: gradients, or buckets; '' if nothing."""

    def collectives(self) -> list[str]:
        """Return the latest collectives of this process, newest first."""

    def reductions(self) -> list[str]:
        """Return the latest reductions of the wrapper's buckets, newest first."""

    def locate(self, thread: int) -> InCollective | None:
        """Return the collective that a thread is in, if it is in one."""


_probes: weakref.WeakSet[Any] = weakref.WeakSet()


def add_probe(probe: Probe) -> None:
    """Ask ``probe``, as long as it lives, when something stalls."""
    _probes.add(probe)


def probes() -> list[Probe]:
    """All that are alive."""
    return [probe for probe in list(_probes) if probe.is_alive]
