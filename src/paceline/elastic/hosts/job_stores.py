"""The launcher's handle of the process that keeps the job's stores (:mod:`hosts.tunnel`).

Used by :mod:`paceline.elastic.job`. If that process dies, it is started again. Must not import
torch.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import time
from collections.abc import Callable
from pathlib import Path

from paceline.elastic.hosts.tunnel import StoreOrder, run_store
from paceline.errors import ConfigurationError
from paceline.launch.exits import exit_summary
from paceline.launch.fork_server import ForkServer
from paceline.launch.rendezvous import JobHosts
from paceline.launch.wire import EndPolicy

_WELL_S = 30.0  # one that has lived so long may die
_MAX_DEATHS = 6  # in a row, each before that
_ENDS_ITSELF = EndPolicy(first=None, grace_s=5.0)  # it removes what a killed launcher leaves


class JobStores:
    """See the module.

    Args:
        server: What the process is forked from.
        selector: That the launcher waits on.
        hosts: Of the job.
        key: Of the job.
        directory: Of the launcher; private.
        warn: Shows a line to the user.
        on_store_port: Gets the port at which other hosts reach the stores.
    """

    def __init__(
        self,
        server: ForkServer,
        selector: selectors.BaseSelector,
        hosts: JobHosts,
        key: bytes,
        directory: Path,
        warn: Callable[[str], None],
        on_store_port: Callable[[int], None],
    ) -> None:
        self._server, self._selector, self._hosts = server, selector, hosts
        self._order = StoreOrder(hosts.number == 0, hosts.count > 1, key, str(directory))
        self._warn, self._on_store_port = warn, on_store_port
        self._ports: dict[str, int] = {}
        self._waiting: list[tuple[str | None, Callable[[int], None]]] = []
        self._store_port = 0
        self._deaths = 0
        self._start()

    def _start(self) -> None:
        self._started_s = time.monotonic()
        self._child = child = self._server.fork(_ENDS_ITSELF)
        child.run(run_store, self._order)
        self._selector.register(child.pipe, selectors.EVENT_READ, self._hear)
        if self._store_port:
            self.aim_at(self._store_port)

    def aim_at(self, store_port: int) -> None:
        """Connections to the stores go to this port of the first host."""
        self._store_port = store_port
        if not self._order.is_first:
            self._say({"target": [self._hosts.endpoint.host, store_port]})
            self._go_on()

    def with_port(self, name: str | None, call: Callable[[int], None]) -> None:
        """Call with the port of a store, once it is there and other hosts can be reached.

        Args:
            name: Of the store; None: whoever asks needs none.
        """
        if name is not None and name not in self._ports:
            self._ask(name)
        self._waiting.append((name, call))
        self._go_on()

    def _go_on(self) -> None:
        if not self._order.is_first and not self._store_port:
            return  # nobody knows yet where the stores are
        waiting, self._waiting = self._waiting, []
        for name, call in waiting:
            port = self._ports.get(name, 0) if name is not None else -1
            if port:
                call(port)
            else:
                self._waiting.append((name, call))

    def _ask(self, name: str) -> None:
        self._say({"open": name})

    def _say(self, words: dict[str, object]) -> None:
        with contextlib.suppress(OSError):  # its end is seen where it is read
            self._child.pipe.send_bytes(json.dumps(words).encode())

    def _hear(self) -> None:
        try:
            words = json.loads(self._child.pipe.recv_bytes())
        except (EOFError, OSError):
            self._on_end()
            return
        if "error" in words:
            raise ConfigurationError(words["error"])
        if "store_port" in words:
            if words["store_port"]:
                self._on_store_port(words["store_port"])
        else:
            self._ports[words["name"]] = words["port"]
            self._go_on()

    def _on_end(self) -> None:
        self._selector.unregister(self._child.pipe)
        code = self._child.wait() or 0
        self._child.close()
        if time.monotonic() - self._started_s >= _WELL_S:
            self._deaths = 0
        self._deaths += 1
        if self._deaths >= _MAX_DEATHS:
            raise ConfigurationError(f"the job's store has {exit_summary(code)}, again and again")
        self._warn(f"the job's store has {exit_summary(code)}; it is started again")
        self._ports = {}
        self._start()
        for name in {name for name, _ in self._waiting if name is not None}:
            self._ask(name)

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._child.pipe)
        self._child.close()
