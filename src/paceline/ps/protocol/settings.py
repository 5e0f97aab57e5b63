"""How a server runs: frozen, checked, the same for ``ps serve`` and ``ps.local``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigurationError

GIB = 1 << 30
IPC, TCP = "ipc://", "tcp://"
SAVES = "saves"
"""In a server's directory: where it saves, unless it was told otherwise."""
_SOCKET_PATH = 100  # bytes; the kernel takes 107


def memory_bytes() -> int:
    """Three quarters of this machine's memory: what ``max_bytes`` is unless somebody says more."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 * 3


@dataclass(frozen=True)
class ServerSettings:
    """All options of a server.

    Args:
        address: ``ipc://PATH``, or ``tcp://HOST:PORT`` with ``keys``.
        directory: Where journal and snapshots are; None keeps everything in memory only.
        fsync: Sync the journal before each acknowledgement, for when the machine may fail too.
        snapshot_every_s: How often a snapshot is taken; 0 for only at the end.
        max_bytes: Of rows and optimizer state, all tables together.
        max_message_bytes: Of one frame, in either direction.
        keys: A directory made by ``paceline ps keys``: who the server is, and who may enter.
        save_root: SAVE and LOAD use directories below this one only; None is ``saves`` in
            ``directory``, and without that they are refused.
    """

    address: str
    directory: Path | None = None
    fsync: bool = False
    snapshot_every_s: float = 60.0
    max_bytes: int = 0
    max_message_bytes: int = GIB
    keys: Path | None = None
    save_root: Path | None = None

    def __post_init__(self) -> None:
        if not self.max_bytes:
            object.__setattr__(self, "max_bytes", memory_bytes())
        _check_address(self.address)
        if self.is_tcp and self.keys is None:
            raise ConfigurationError(
                f"a server at {self.address} needs keys: whoever reaches its port could read and "
                "change every table. `paceline ps keys DIR` makes them; then --keys DIR"
            )
        if not self.is_tcp and self.keys is not None:
            raise ConfigurationError(
                f"keys are for tcp; {self.address} is protected by its directory's permissions"
            )
        if self.fsync and self.directory is None:
            raise ConfigurationError("fsync without a directory: there is no journal to sync")
        for name in ("snapshot_every_s", "max_bytes", "max_message_bytes"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} is below 0: {getattr(self, name)}")

    @property
    def is_tcp(self) -> bool:
        """Say whether others than this host's users can try to connect."""
        return self.address.startswith(TCP)

    @property
    def allowed_save_root(self) -> Path | None:
        """Where SAVE and LOAD are allowed."""
        if self.save_root is not None or self.directory is None:
            return self.save_root
        return self.directory / SAVES

    @property
    def socket_path(self) -> Path | None:
        """The socket's file, for ipc."""
        return None if self.is_tcp else Path(self.address.removeprefix(IPC))


def _check_address(address: str) -> None:
    if address.startswith(IPC) and len(address) > len(IPC):
        path = address.removeprefix(IPC)
        check_socket_name(path)
        if len(os.fsencode(path)) > _SOCKET_PATH:
            raise ConfigurationError(
                f"the path of a socket has at most {_SOCKET_PATH} bytes, and {path!r} has more"
            )
        return
    host, _, port = address.removeprefix(TCP).rpartition(":")
    is_port = port == "*" or (port.isdigit() and int(port) < 65536)
    if address.startswith(TCP) and host and is_port:
        return
    raise ConfigurationError(f"an address is ipc://PATH or tcp://HOST:PORT, not {address!r}")


def check_socket_name(path: str) -> None:
    """Refuse a Unix socket that is no file.

    Raises:
        ConfigurationError: Whoever comes first may have such a name, and everybody may connect.
    """
    if path.startswith(("@", "\0")) or path == "*":
        raise ConfigurationError(
            f"ipc://{path} is a socket without a file, which any user of this host may connect to, "
            "or take the name of: use ipc://PATH, or tcp://127.0.0.1:PORT with keys"
        )


def full_path(path: Path) -> Path:
    """Where the socket's file is while the server is full."""
    return path.with_name(path.name + ".full")
