"""Who may connect over tcp: whose key the server's directory lists. ``zmq.auth`` speaks ZAP.

Called by ``ps/server/zmq_socket.py`` from the server's own loop; there is no thread. Its socket has
CURVE_SERVER set, so libzmq ends every other handshake before it asks here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container
from typing import Any

import zmq
from zmq.auth.base import Authenticator

from paceline.ps.server.refusal_log import RefusalLog

DOMAIN = "paceline"


class KeyCheck(Authenticator):
    """Answers ZAP requests; logs who is refused, by address.

    Args:
        context: Of the server.
        clients: Public keys that are let in.
        refusals: What is written about the others.
    """

    def __init__(
        self, context: zmq.Context[Any], clients: Container[bytes], refusals: RefusalLog
    ) -> None:
        super().__init__(context)
        self._clients = clients
        self._refusals = refusals
        self._address = ""
        self.configure_curve_callback(DOMAIN, self)

    def answer_all(self) -> None:
        """Answer all that wait."""
        with contextlib.suppress(zmq.Again):
            while True:
                request = self.zap_socket.recv_multipart(zmq.NOBLOCK)
                self._address = request[3].decode(errors="replace")
                # A coroutine because a callback may be one; ours is not, so nothing is awaited.
                with contextlib.suppress(StopIteration):
                    self.handle_zap_message(request).send(None)

    def callback(self, domain: str, key: bytes) -> bool:
        """Say whether a key is listed."""
        is_known = key in self._clients
        if not is_known:
            self._refusals.add(
                f"refused a connection from {self._address}: its key is not in the server's "
                "clients/ directory"
            )
        return is_known
