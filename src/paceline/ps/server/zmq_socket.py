"""The server's socket and who may connect to it.

Called by ``ps/server/loop.py``. For tcp, each connection is encrypted and authenticated (CURVE),
and ``ps/server/key_check.py`` looks up its key. For ipc, the socket has mode 0600, and libzmq asks
the kernel who is at the other end: nobody but this user.
Connections that fail are logged with their address, a few at a time. Nobody is let in when
descriptors run out: over ipc ``ps/server/listener.py`` sees to that, over tcp the port is closed
meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket as sockets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.errors import ServerStartError
from paceline.ps.protocol.keys import read_server_keys
from paceline.ps.protocol.settings import ServerSettings, full_path
from paceline.ps.server.descriptors import DescriptorLimit
from paceline.ps.server.key_check import DOMAIN, KeyCheck
from paceline.ps.server.listener import SocketFile
from paceline.ps.server.private import private_umask
from paceline.ps.server.refusal_log import RefusalLog

_HANDSHAKE_MS = 5000
_HEARTBEAT_MS = 15_000  # tcp: a peer whose machine vanished is let go
AGAIN_MS = 200
"""While the port is closed, whether it can be opened is looked at so often."""
_CRYPTOGRAPHIC = 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
_FAILURES = {
    zmq.EVENT_ACCEPT_FAILED: "it is of another user of this host, or there are no descriptors left",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it did not complete the handshake",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak as expected (no keys, or no ZeroMQ)",
}


class ServerSocket:
    """Opens the socket, and lets in who has a listed key.

    Args:
        context: Of the server.
        settings: The address, and where its keys are.
        refusals: What is written about who is not let in.
        descriptors: How many connections there may be.

    Raises:
        ConfigurationError: The keys cannot be read.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        settings: ServerSettings,
        refusals: RefusalLog,
        descriptors: DescriptorLimit,
    ) -> None:
        self._context = context
        self._settings = settings
        self._refusals = refusals
        self._descriptors = descriptors
        self._router: Any = None
        self._socket_file: SocketFile | None = None
        self._closed_port = ""
        self._keys = None if settings.keys is None else read_server_keys(settings.keys)
        self._key_check: KeyCheck | None = None
        self._monitor: Any = None

    @property
    def sockets(self) -> list[Any]:
        """Those to poll besides the one that ``open`` returns."""
        zap = None if self._key_check is None else self._key_check.zap_socket
        return [each for each in (zap, self._monitor) if each is not None]

    def open(self, queued: int) -> Any:
        """The server's ROUTER socket, bound.

        Raises:
            ServerStartError: The address is in use, or cannot be had.
        """
        self._check_room()
        if self._keys is not None:
            self._key_check = KeyCheck(self._context, self._keys.clients, self._refusals)
            self._key_check.start()
        router = self._context.socket(zmq.ROUTER)
        for option, value in self._options(queued).items():
            router.setsockopt(option, value)
        monitor = router.get_monitor_socket(sum(_FAILURES) | zmq.EVENT_ACCEPTED)
        self._bind(router)
        if self._socket_file is None:
            self._monitor = monitor
        else:
            self._socket_file.watch(monitor, self._note)
        self._router = router
        return router

    @property
    def is_shut(self) -> bool:
        """Say whether the port is closed until there is room: ``look`` every ``AGAIN_MS``."""
        return bool(self._closed_port)

    def has_messages(self, ready: Mapping[Any, int]) -> bool:
        """Say whether ``look`` has something to do."""
        return any(each in ready for each in self.sockets)

    def look(self) -> None:
        """Answer who asks to come in, and log who could not."""
        if self._key_check is not None:
            self._key_check.answer_all()
        with contextlib.suppress(zmq.Again):
            while self._monitor is not None:
                self._note(recv_monitor_message(self._monitor, zmq.NOBLOCK))
        if self._settings.is_tcp:
            self._turn_port()

    def close(self) -> None:
        """Close what ``open`` opened besides the router, and remove the socket's file."""
        for each in self.sockets:
            each.close(linger=0)
        if self._socket_file is not None:
            self._socket_file.close()
        elif self._settings.socket_path is not None:
            self._settings.socket_path.unlink(missing_ok=True)

    def _note(self, event: Mapping[str, Any]) -> None:
        """Log who could not come in."""
        reason = _FAILURES.get(event["event"])
        if reason is None:
            return
        is_protocol = event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        if is_protocol and event["value"] == _CRYPTOGRAPHIC:
            reason = "its keys do not fit this server: perhaps they are for another one"
        where = event["endpoint"].decode(errors="replace")
        self._refusals.add(f"refused a connection to {where}: {reason}")

    def _turn_port(self) -> None:
        """Close the port while there are no descriptors; what is connected stays."""
        if self._closed_port:
            if not self._descriptors.is_full:
                with contextlib.suppress(zmq.ZMQError):  # the old one is not gone yet
                    self._router.bind(self._closed_port)
                    self._closed_port = ""
        elif self._descriptors.is_full:
            port = self._router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
            with contextlib.suppress(zmq.ZMQError):
                self._router.unbind(port)
                self._closed_port = port
            limit = self._descriptors.limit
            self._refusals.add(
                f"refuses connections to {port}: of {limit} descriptors too many are in use; raise "
                "the limit (ulimit -n, LimitNOFILE=)"
            )

    def _options(self, queued: int) -> dict[int, Any]:
        options: dict[int, Any] = {
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: self._settings.max_message_bytes,
            zmq.RCVHWM: queued,
            zmq.SNDHWM: queued,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
            # A reply that cannot go out is counted instead of vanishing.
            zmq.ROUTER_MANDATORY: 1,
        }
        if self._keys is not None:
            options |= {
                zmq.CURVE_SERVER: 1,
                zmq.CURVE_SECRETKEY: self._keys.secret,
                zmq.ZAP_DOMAIN: DOMAIN.encode(),
                zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
                zmq.HEARTBEAT_TIMEOUT: 2 * _HEARTBEAT_MS,
            }
        else:
            options[zmq.IPC_FILTER_UID] = os.geteuid()
        return options

    def _bind(self, router: Any) -> None:
        path = self._settings.socket_path
        try:
            if path is not None:
                _make_place(path)
                if sys.platform == "linux":
                    self._socket_file = SocketFile(path, self._descriptors)
                    router.setsockopt(zmq.USE_FD, self._socket_file.duplicate())
            with private_umask():
                router.bind(self._settings.address)
        except (zmq.ZMQError, OSError) as error:
            if self._socket_file is not None:
                self._socket_file.close()
            known = {
                errno.EADDRINUSE: "the address is in use by another program",
                errno.EADDRNOTAVAIL: "this machine does not have that address",
                errno.ENODEV: "this machine does not have that address",
                errno.EACCES: "permission denied",
                errno.EPERM: "there is a file of another user",
                errno.EEXIST: "there is a file that is no socket",
            }
            reason = known.get(error.errno or 0, str(error))
            raise ServerStartError(f"{self._settings.address}: {reason}") from None

    def _check_room(self) -> None:
        if self._descriptors.is_too_small:
            raise ServerStartError(
                f"{self._settings.address}: {self._descriptors.limit} descriptors are too few "
                "for a server: raise the limit (ulimit -n, LimitNOFILE=)"
            )


def _make_place(path: Path) -> None:
    """Make a private directory for the socket; refuse if somebody listens there."""
    with private_umask():
        path.parent.mkdir(parents=True, exist_ok=True)
    for each in (path, full_path(path)):
        if each.exists() and not each.is_socket():
            raise OSError(errno.EEXIST, "no socket")
        if _is_listening(each):
            raise OSError(errno.EADDRINUSE, "in use")


def _is_listening(path: Path) -> bool:
    with sockets.socket(sockets.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):  # left behind by a killed server
            return False
        except (BlockingIOError, TimeoutError):  # its queue is full
            return True
    return True
