"""The stores of a job, on all its hosts.

A child of each launcher's fork server runs :func:`run_store`. Ranks of several hosts reach the
stores in which they meet (:mod:`hosts.key_store`) by a Unix socket in the private directory of
their launcher. On the first host they are served there; on the others each connection is passed on
to the first one: both ends prove that they know the job's key, and from then on bytes go through.

Beside them there is a TCPStore for each attempt to begin: what ``MASTER_ADDR`` and ``MASTER_PORT``
name, for scripts that use them by themselves. It knows no key, listens at the loopback address
only, and is reached from other hosts in the same way. Processes of the same host can reach it, as
under torchrun; nothing of ours is in it.

JSON on the pipe to the launcher. At first ``store_port``, the port for other hosts. Then the
launcher may say ``open`` with the name of a store, and gets its ``port`` on this host; and
``target``, where the store port of the first host is.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from paceline.elastic.handshake import connect
from paceline.elastic.hosts.key_store import KeyStores
from paceline.elastic.hosts.private_directory import remove_left
from paceline.elastic.keyed_listener import KeyedListener, listen_at
from paceline.elastic.protocol import send, stores_path
from paceline.errors import MembershipError
from paceline.launch.exits import leave

_CONNECT_S = 10.0
_TIMEOUT = datetime.timedelta(seconds=900)
_LOOPBACK = "127.0.0.1"
_MAX_NAME = 40
_KEPT = 2  # attempts before this one


@dataclass(frozen=True)
class StoreOrder:
    """What the child is started with.

    Attributes:
        is_first: The stores are served here.
        has_others: There are other hosts.
        key: Of the job.
        directory: Of the launcher; private. Ranks reach the stores of several hosts in it.
    """

    is_first: bool
    has_others: bool
    key: bytes = field(repr=False)
    directory: str


def run_store(pipe: Connection, order: StoreOrder) -> NoReturn:
    """The whole life of the process: what the fork server's child runs."""
    code = keep_store(pipe, order)
    remove_left(Path(order.directory))  # the launcher was killed, and the key is in there
    leave(code)


def keep_store(pipe: Connection, order: StoreOrder) -> int:
    """Serve or reach the stores until the launcher closes its pipe, or its end does."""
    try:
        keeper = _Served(order) if order.is_first else _Reached(order)
        _say(pipe, store_port=keeper.store_port)
        while True:
            words = json.loads(pipe.recv_bytes())
            if "target" in words:
                keeper.target = (str(words["target"][0]), int(words["target"][1]))
            else:
                _say(pipe, name=words["open"], port=keeper.port_of(words["open"]))
    except EOFError:
        return 0
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            _say(pipe, error=f"the job's store: {error}")
        return 1


def _say(pipe: Connection, **words: Any) -> None:
    pipe.send_bytes(json.dumps(words).encode())


class _Served:
    """The stores themselves, and the listeners in front of them."""

    def __init__(self, order: StoreOrder) -> None:
        self.target: tuple[str, int] | None = None
        self.store_port = 0
        self._lock = threading.Lock()
        self._stores: dict[str, tuple[int, Any]] = {}
        self._listeners = []
        if order.has_others:
            far, near = listen_at(("", 0)), listen_at(stores_path(Path(order.directory)))
            self.store_port = far.getsockname()[1]
            self._keys = KeyStores()
            self._listeners = [KeyedListener(each, order.key, self._admit) for each in (far, near)]

    def port_of(self, name: str) -> int:
        """Where a store is on this host. Attempts before the last two are forgotten."""
        with self._lock:
            if name not in self._stores:
                self._stores[name] = self._serve()
                for old in list(self._stores)[: -_KEPT - 1]:
                    del self._stores[old]
            return self._stores[name][0]

    def _serve(self) -> tuple[int, Any]:
        import torch.distributed as dist

        listener = listen_at((_LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            _LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_TIMEOUT,
            master_listen_fd=listener.detach(),
        )
        return port, store

    def _admit(self, hello: dict[str, Any], pipe: Connection) -> None:
        """In a thread of its own."""
        if hello["kind"] == "keys":
            self._keys.serve(str(hello.get("name"))[:_MAX_NAME], pipe)
        else:
            self._pass_on(hello, pipe)

    def _pass_on(self, hello: dict[str, Any], pipe: Connection) -> None:
        outside = socket.socket(fileno=os.dup(pipe.fileno()))
        pipe.close()
        try:
            port = self.port_of(str(hello["name"])[:_MAX_NAME])
            inside = socket.create_connection((_LOOPBACK, port), _CONNECT_S)
        except (OSError, RuntimeError, KeyError):
            outside.close()
            return
        splice(outside, inside)


class _Reached:
    """Connections of ranks of this host, passed on to the first one."""

    store_port = 0

    def __init__(self, order: StoreOrder) -> None:
        self.target: tuple[str, int] | None = None
        self._key = order.key
        own = listen_at(stores_path(Path(order.directory)))
        self._listener = KeyedListener(own, order.key, self._admit)
        self._listeners: dict[str, socket.socket] = {}

    def port_of(self, name: str) -> int:
        """Where connections to a store are passed on."""
        if name not in self._listeners:
            self._listeners[name] = listener = listen_at((_LOOPBACK, 0))
            run = partial(self._accept, listener, name)
            threading.Thread(target=run, name="paceline-tunnel", daemon=True).start()
        return int(self._listeners[name].getsockname()[1])

    def _accept(self, listener: socket.socket, name: str) -> None:
        while True:
            try:
                inside, _ = listener.accept()
            except OSError:
                continue
            threading.Thread(target=self._pass_on, args=(inside, name), daemon=True).start()

    def _admit(self, hello: dict[str, Any], pipe: Connection) -> None:
        """A rank of this host; in a thread of its own."""
        inside = socket.socket(fileno=os.dup(pipe.fileno()))
        pipe.close()
        self._pass_on(inside, str(hello.get("name")), "keys")

    def _pass_on(self, inside: socket.socket, name: str, kind: str = "store") -> None:
        pipe = self._reach(name, kind)
        if pipe is None:
            inside.close()  # the client in the rank says that it cannot
            return
        outside = socket.socket(fileno=os.dup(pipe.fileno()))
        pipe.close()
        splice(outside, inside)

    def _reach(self, name: str, kind: str) -> Connection | None:
        """Connect to the first host; wait for it, if it is not there or not known yet."""
        until_s = time.monotonic() + _CONNECT_S
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError, EOFError, MembershipError):
                if self.target is not None:
                    pipe = connect(self.target, self._key, _CONNECT_S)
                    send(pipe, kind, name=name)
                    return pipe
            time.sleep(0.05)
        return None


def splice(one: socket.socket, other: socket.socket) -> None:
    """Pass bytes on in both directions until both have ended. Does not wait."""
    left = [2]
    lock = threading.Lock()
    for source, target in ((one, other), (other, one)):
        source.settimeout(None)
        if source.family != socket.AF_UNIX:
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        run = partial(_copy, source, target, left, lock)
        threading.Thread(target=run, name="paceline-splice", daemon=True).start()


def _copy(source: socket.socket, target: socket.socket, left: list[int], lock: Any) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
    with lock:
        left[0] -= 1
        if not left[0]:
            source.close()
            target.close()
