"""Keys for tcp: who a server is, and who may enter. CURVE, so encrypted as well.

Made by ``paceline ps keys DIR``, read by ``ps/server/zmq_socket.py`` and, on the trainer's side, by
``ps.connect(keys=...)``. In DIR there is

=============== ==================================================================
``server/``     for the server: ``server.key`` (secret), ``server.pub``, and in
                ``clients/`` the public key of everybody who may enter
``NAME/``       for a client, ``client`` by default: ``client.key`` (secret),
                ``client.pub``, ``server.pub``
=============== ==================================================================

A key is one line of 40 characters (Z85). Files are readable by their owner only. A secret that
others can read is refused, and so is a key, or a directory of keys, that others could change: they
would let themselves in, or a server of theirs. Secrets are never printed, logged or put into an
error.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import ConfigurationError

_Z85 = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,60}")


@dataclass(frozen=True)
class ServerKeys:
    """What a server needs."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: dict[bytes, str]
    """Names of those who may enter, by public key."""


@dataclass(frozen=True)
class ClientKeys:
    """What a trainer needs."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes

    def curve(self) -> dict[str, bytes]:
        """As options of a ZeroMQ socket."""
        return {
            "curve_publickey": self.public,
            "curve_secretkey": self.secret,
            "curve_serverkey": self.server,
        }


def make_keys(directory: Path, client: str = "client") -> list[Path]:
    """Make a server's keys, unless they are there, and one client's; returns the directories.

    Raises:
        ConfigurationError: The client has keys already, or its name cannot be a directory's.
    """
    import zmq

    if not _NAME.fullmatch(client) or client == "server":
        raise ConfigurationError(
            f"a client's name has letters, digits, - and _, and is not 'server': {client!r}"
        )
    server_dir, client_dir = directory / "server", directory / client
    if client_dir.exists():
        raise ConfigurationError(f"{client_dir} is there already; take another --client NAME")
    for each in (directory, server_dir, server_dir / "clients", client_dir):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (server_dir / "server.key").exists():
        public, secret = zmq.curve_keypair()
        _write(server_dir / "server.key", secret)
        _write(server_dir / "server.pub", public)
    public, secret = zmq.curve_keypair()
    _write(client_dir / "client.key", secret)
    _write(client_dir / "client.pub", public)
    _write(client_dir / "server.pub", _read(server_dir / "server.pub"))
    _write(server_dir / "clients" / f"{client}.pub", public)
    return [server_dir, client_dir]


def read_server_keys(directory: Path) -> ServerKeys:
    """Read what ``make_keys`` made for a server.

    Raises:
        ConfigurationError: Something is missing, is no key, or is open to others.
    """
    for each in (directory, directory / "clients"):
        _check_unchanged(each)
    clients = {_read(path): path.stem for path in sorted((directory / "clients").glob("*.pub"))}
    keys = ServerKeys(
        _read(directory / "server.pub"), _read_secret(directory / "server.key"), clients
    )
    if not clients:
        raise ConfigurationError(f"{directory / 'clients'} has no key, so nobody could enter")
    return keys


def read_client_keys(directory: Path) -> ClientKeys:
    """Read what ``make_keys`` made for a client.

    Raises:
        ConfigurationError: Something is missing, is no key, or is open to others.
    """
    _check_unchanged(directory)
    return ClientKeys(
        _read(directory / "client.pub"),
        _read_secret(directory / "client.key"),
        _read(directory / "server.pub"),
    )


def _write(path: Path, key: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key + b"\n")


def _check_unchanged(path: Path) -> None:
    """Refuse what another user, root excepted, could have changed."""
    try:
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from None
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigurationError(f"{path} belongs to user {found.st_uid}: copy it, as your own")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigurationError(f"others can change {path}: chmod go-w {path}")


def _unreadable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"the key {path} cannot be read ({error.strerror}): `paceline ps keys DIR` makes keys"
    )


def _read(path: Path) -> bytes:
    _check_unchanged(path)
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise _unreadable(path, error) from None
    if not _Z85.fullmatch(key):
        raise ConfigurationError(f"{path} is no key: a key is one line of 40 characters")
    return key


def _read_secret(path: Path) -> bytes:
    key = _read(path)
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError(f"others can read the secret key {path}: chmod 600 {path}")
    return key
