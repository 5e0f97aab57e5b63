"""``ps.connect``: a trainer's connection to all its servers. Called by users and by the modules.

Must not know what a lookup is: it hands out channels, and does what concerns servers as a whole
(save, load, stats, flush, close).
"""

from __future__ import annotations

import logging
import os
import secrets
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import zmq

from paceline.errors import ConfigurationError, ServerRefusedError
from paceline.ps.client.channel import Channel, ChannelLimits
from paceline.ps.client.control import answer, ask, load_everywhere
from paceline.ps.client.link import Link
from paceline.ps.client.refused_pushes import check_refused
from paceline.ps.protocol.keys import read_client_keys
from paceline.ps.protocol.settings import IPC, check_socket_name
from paceline.ps.protocol.table_spec import SHARDS
from paceline.ps.protocol.wire import Kind

log = logging.getLogger("paceline.ps")


class HasAddresses(Protocol):
    """What ``ps.local`` returns, as far as a trainer needs it."""

    @property
    def addresses(self) -> list[str]:
        """One for each server."""


def connect(
    addresses: Sequence[str] | HasAddresses,
    *,
    keys: str | os.PathLike[str] | None = None,
    timeout_s: float = 120.0,
) -> Servers:
    """Connect to running servers, and wait until each has answered.

    The order of addresses says which server has which rows: it must be the same for all trainers.

    Args:
        addresses: ``ipc://PATH`` or ``tcp://HOST:PORT`` of each, or what ``ps.local`` returned.
        keys: A directory made by ``paceline ps keys``, for tcp.
        timeout_s: How long to wait for a server, now and later. Nobody notices one that is started
            again within this time.

    Raises:
        ServerLostError: A server did not answer.
        ServerKeyError: A server does not accept the key.
        ConfigurationError: An argument is wrong.
    """
    found = list(addresses if isinstance(addresses, (list, tuple)) else addresses.addresses)  # type: ignore[union-attr]
    if not 1 <= len(found) <= SHARDS or not all(isinstance(each, str) for each in found):
        raise ConfigurationError(f"ps.connect takes 1 to {SHARDS} addresses, not {found!r:.200}")
    for address in found:
        if address.startswith(IPC):
            check_socket_name(address.removeprefix(IPC))
    servers = Servers(found, _curve(keys), ChannelLimits(timeout_s=timeout_s))
    try:
        servers.wait_open()
    except BaseException:
        servers.close(flush=False)
        raise
    return servers


class Servers:
    """A connection to servers. A context manager; made by :func:`connect`.

    Attributes:
        addresses: Of the servers, in their order.
        epoch: Grows when rows are written or loaded through this connection.
    """

    def __init__(
        self, addresses: list[str], curve: dict[str, bytes], limits: ChannelLimits
    ) -> None:
        self.addresses = addresses
        self.epoch = 0
        context: Any = zmq.Context()
        client = secrets.token_bytes(16)
        self.channels = tuple(
            Channel(index, Link(context, address, curve, client), client, limits)
            for index, address in enumerate(addresses)
        )
        self._finalizer = weakref.finalize(self, _end, context, self.channels, os.getpid())

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(flush=kind is None)

    def __len__(self) -> int:
        return len(self.channels)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(
            "a connection to servers cannot be copied or pickled: call ps.connect in each process"
        )

    @property
    def routes(self) -> list[str]:
        """How data travel to each server now: ``"shared memory"``, ``"ipc"`` or ``"tcp"``."""
        return [channel.route for channel in self.channels]

    def wait_open(self) -> None:
        """Wait until every server has answered once."""
        for channel in self.channels:
            channel.open()
        for channel in self.channels:
            channel.wait_open()

    def save(self, path: str | os.PathLike[str], timeout_s: float | None = None) -> list[str]:
        """Write all tables, with optimizer state, to a directory that all servers see.

        What was pushed before is in it. Training goes on meanwhile, of other trainers too. A save
        that is there already is replaced when all servers have saved, and not before.

        Args:
            path: Below the directory that the servers were given for saves (``--save-root``). A
                relative one is taken below that if the working directory is not there.
            timeout_s: Instead of that of the connection.

        Returns:
            The files.
        """
        self.flush(timeout_s)
        control = {**_place(path), "save": secrets.token_hex(8)}
        found = self.ask_all(Kind.SAVE, control, timeout_s)
        try:
            self.ask_all(Kind.SAVE, {**control, "tidy": True}, timeout_s)
        except ServerRefusedError as error:  # what was to be saved is saved
            log.warning("an older save could not be deleted: %s", error)
        return [file for each in found for file in each.get("files", ())]

    def load(self, path: str | os.PathLike[str], timeout_s: float | None = None) -> None:
        """Replace the rows of all attached tables by saved ones, with optimizer state.

        The number of servers and the sharding may be others than when it was saved. One trainer
        loads, while the others wait. First every server reads and checks what it needs; if one
        cannot, nothing is changed on any.

        Raises:
            ServerRefusedError: The save is damaged, does not fit, or is of other tables.
            ServerError: Some servers have loaded, and others have not; the text says which.
        """
        self.flush(timeout_s)
        self.epoch += 1
        load_everywhere(self.channels, _place(path), timeout_s)

    def stats(self) -> list[dict[str, Any]]:
        """What each server tells about itself and its tables."""
        found = self.ask_all(Kind.STATS, {})
        for channel, each in zip(self.channels, found, strict=True):
            while len(each["tables"]) < each.get("table_count", 0):  # it tells some at a time
                more = ask(channel, Kind.STATS, {"first": len(each["tables"])})
                each["tables"].extend(answer(channel, more, None)["tables"])
        return found

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every push is acknowledged: applied, and in the journal if there is one.

        Raises:
            PushRefusedError: A server has refused some; the others are applied.
        """
        for channel in self.channels:
            channel.flush(timeout_s)
        check_refused(self.channels, "flush")

    def close(self, flush: bool = True) -> None:
        """Flush, then let go of the servers, which go on. Idempotent."""
        if self._finalizer.alive:
            try:
                if flush:
                    self.flush()
            finally:
                self._finalizer()

    def ask_all(
        self, kind: Kind, control: Mapping[str, Any], timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Ask every server the same; all work at the same time."""
        asked = [(channel, ask(channel, kind, control)) for channel in self.channels]
        return [answer(channel, pending, timeout_s) for channel, pending in asked]

    def ask(self, requests: Sequence[tuple[int, Kind, Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """Ask single servers; all requests go out before it waits for the first answer."""
        asked = [
            (self.channels[server], ask(self.channels[server], kind, control))
            for server, kind, control in requests
        ]
        return [answer(channel, pending, None) for channel, pending in asked]


def as_servers(servers: Servers | HasAddresses | Sequence[str]) -> tuple[Servers, bool]:
    """A connection, and whether it was made here, so that whoever asked must close it."""
    if isinstance(servers, Servers):
        return servers, False
    return connect(servers), True


def _place(path: str | os.PathLike[str]) -> dict[str, str]:
    """What SAVE and LOAD say of a directory; see ``ps/server/save_root.py``."""
    found = {"path": os.fspath(Path(path).absolute())}
    return found if Path(path).is_absolute() else {**found, "relative": os.fspath(path)}


def _end(context: Any, channels: Sequence[Channel], owner: int) -> None:
    if os.getpid() != owner:  # a forked child: ZeroMQ must not be touched there
        return
    for channel in channels:
        channel.close()
    context.term()


def _curve(keys: str | os.PathLike[str] | None) -> dict[str, bytes]:
    return {} if keys is None else read_client_keys(Path(keys)).curve()
