"""Both ends of a connection prove that they know the job's key, before a word is said.

Used by whoever connects inside of an elastic job: ranks and ``paceline scale`` to their launcher,
launchers to the coordinator, tunnels to the store. HMAC-SHA256 over what both ends have drawn, with
the role in it, so that nothing which one end has said can be sent back to it as an answer. Messages
that follow are not signed one by one: who can change packets on the way can change them.

    server -> client   32 random bytes
    client -> server   32 random bytes, and the client's proof
    server -> client   the server's proof
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import stat
import struct
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from paceline.errors import ConfigurationError, MembershipError

KEY_BYTES = 32
_DRAWN_BYTES = 32
_PROOF_BYTES = 32
_SILENT_S = 300


def admit(pipe: Connection, key: bytes) -> None:
    """The server's part.

    Raises:
        MembershipError: The other end does not know the key.
        EOFError, OSError: It is gone, too slow, or says something else.
    """
    ours = os.urandom(_DRAWN_BYTES)
    pipe.send_bytes(ours)
    answer = pipe.recv_bytes(_DRAWN_BYTES + _PROOF_BYTES)
    theirs, proof = answer[:_DRAWN_BYTES], answer[_DRAWN_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"client", ours, theirs)):
        raise MembershipError("it does not know the job's key")
    pipe.send_bytes(_proof(key, b"server", ours, theirs))


def introduce(pipe: Connection, key: bytes) -> None:
    """The client's part; raises as :func:`admit`."""
    ours, theirs = os.urandom(_DRAWN_BYTES), pipe.recv_bytes(_DRAWN_BYTES)
    if len(theirs) != _DRAWN_BYTES:
        raise MembershipError("what listens there is not this job")
    pipe.send_bytes(ours + _proof(key, b"client", theirs, ours))
    if not hmac.compare_digest(pipe.recv_bytes(_PROOF_BYTES), _proof(key, b"server", theirs, ours)):
        raise MembershipError("what listens there does not know the job's key")


def connect(address: str | tuple[str, int], key: bytes, timeout_s: float = 20.0) -> Connection:
    """Connect to a path or to a host and port, and do the handshake.

    Raises:
        MembershipError: It is not the same job.
        EOFError, OSError: Nobody is there, or nobody answers.
    """
    if isinstance(address, str):
        plug = socket.socket(socket.AF_UNIX)
        try:
            plug.settimeout(timeout_s)
            plug.connect(address)
        except BaseException:
            plug.close()
            raise
    else:
        plug = socket.create_connection(address, timeout_s)
        plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end_if_silent(plug)
    set_timeout(plug, timeout_s)
    pipe = Connection(plug.detach())
    try:
        introduce(pipe, key)
    except BaseException:
        pipe.close()
        raise
    limit_waits(pipe, 0)
    return pipe


def set_timeout(connection: socket.socket, seconds: float) -> None:
    """For reads and writes of whoever uses its descriptor; 0 for none."""
    interval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)


def end_if_silent(connection: socket.socket) -> None:
    """Have the kernel end a TCP connection whose other end is gone without a word.

    A host that loses its power does not hang up: whoever waits for it would do so for ever.
    """
    if connection.family == socket.AF_UNIX or sys.platform != "linux":
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _SILENT_S // 5),
        (socket.TCP_KEEPINTVL, _SILENT_S // 10),
        (socket.TCP_KEEPCNT, 8),
        (socket.TCP_USER_TIMEOUT, 1000 * _SILENT_S),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def limit_waits(pipe: Connection, seconds: float) -> None:
    """Let reads and writes fail that take longer; 0 for never."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as same:
        set_timeout(same, seconds)


def store_key(path: Path, key: bytes) -> None:
    """Write a key to a new file that only this user can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(key + b"\n")


def read_key(path: Path) -> bytes:
    """Read a key.

    Raises:
        ConfigurationError: It cannot be read, is too short, or others can read or change it.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            key = file.read(4096).strip()
    except OSError as error:
        raise ConfigurationError(f"the job's key {path} cannot be read: {error.strerror}") from None
    if status.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigurationError(
            f"others can read or change the job's key {path}: chmod 600 {path}"
        )
    if len(key) < KEY_BYTES:
        raise ConfigurationError(
            f"the job's key {path} is too short: make one with head -c32 /dev/urandom | xxd -p -c64"
        )
    return key


def _proof(key: bytes, role: bytes, servers: bytes, clients: bytes) -> bytes:
    return hmac.new(key, b"paceline elastic " + role + servers + clients, hashlib.sha256).digest()
