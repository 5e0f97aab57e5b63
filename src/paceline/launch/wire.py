"""What owners and the fork server say to each other: three fixed messages on Unix sockets.

Shared by ``fork_server.py`` and ``child.py`` (an owner's side) and ``server_process.py``.

An owner has one *connection* to the server. With each REQUEST on it come five descriptors: the
child's control socket, its pipe, and its stdin, stdout and stderr. From then on

    control   server to owner   CHILD_STARTED once, then CHILD_ENDED once; if there can be no
                                child, CHILD_STARTED with -errno, and that is all
              owner to server   one byte for each signal: its number, plus GROUP for the group
    pipe      owner to child    the order: what to run; then whatever the two agree on

On the first connection the server says READY, once, when it has imported everything: before that
it has no child.

Who holds the owner's end of the control socket owns the child. When it closes, for whatever reason,
the server ends the child: see :class:`EndPolicy`.
"""

from __future__ import annotations

import signal
import struct
from dataclasses import dataclass

GROUP = 0x80
"""Added to the number of a signal that is for the child's whole process group."""
DESCRIPTORS = 5
READY = b"r"
CHILD_STARTED = struct.Struct("<q")  # pid, or -errno
CHILD_ENDED = struct.Struct("<qq")  # exit code as in subprocess, CLOCK_MONOTONIC in ns
_REQUEST = struct.Struct("<BBd")
REQUEST_BYTES = _REQUEST.size


@dataclass(frozen=True)
class EndPolicy:
    """How the server ends a child, with all of its session, that nobody owns any more.

    Attributes:
        first: The signal that it gets at once; None leaves it to what it reads from its pipe.
        grace_s: After so long SIGKILL follows.
    """

    first: signal.Signals | None = signal.SIGKILL
    grace_s: float = 0.0


@dataclass(frozen=True)
class Request:
    """One child is wanted.

    Attributes:
        end: What happens when it is orphaned.
        may_fork: It gets a connection to the server of its own, and may ask for children.
    """

    end: EndPolicy = EndPolicy()
    may_fork: bool = False

    def pack(self) -> bytes:
        """As bytes, REQUEST_BYTES of them."""
        return _REQUEST.pack(self.end.first or 0, self.may_fork, self.end.grace_s)

    @classmethod
    def unpack(cls, data: bytes) -> Request:
        """Undo :meth:`pack`."""
        first, may_fork, grace_s = _REQUEST.unpack(data)
        return cls(EndPolicy(signal.Signals(first) if first else None, grace_s), bool(may_fork))
