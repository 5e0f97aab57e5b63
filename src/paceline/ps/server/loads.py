"""A server's part in a load: get it ready, then do it. Called by ``ps/server/dispatch.py``.

[Note: two steps]
A trainer first asks every server to STAGE: all files are read and checked, and a server with a
directory has the rows on its own disk when it answers. That is done by a forked child, so training
goes on, and whatever can go wrong goes wrong here, where nothing has changed on any server. Then
comes LOAD, which names what was staged by its token. A server that was started again meanwhile
does not know the token, and does both steps in one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.ps.protocol.wire import Message
from paceline.ps.server.save_root import SaveRoot
from paceline.ps.state.refusal import Code, Refusal
from paceline.ps.state.store import Store
from paceline.ps.storage.durable import Durable
from paceline.ps.storage.load import build_aside, check_memory, find_save

Work = Callable[[], dict[str, Any]]
_TOKEN = re.compile("[0-9a-f]{16}")


class Loads:
    """Of one server.

    Args:
        store: Whose rows are replaced.
        durable: Its directory, or None for memory only.
        place: Where clients may load from.
    """

    def __init__(self, store: Store, durable: Durable | None, place: SaveRoot) -> None:
        self._store = store
        self._durable = durable
        self._place = place

    def stage(self, control: Mapping[str, Any]) -> Work | None:
        """What a forked child does to get a load ready; None if there is nothing to do.

        Raises:
            Refusal: The message is wrong, or the directory not allowed.
        """
        if "forget" in control:
            if self._durable is not None:
                self._durable.forget_staged(_token(control["forget"]))
            return None
        directory, token = self._place.directory(control, Code.LOAD), secrets.token_hex(8)

        def work() -> dict[str, Any]:
            try:
                return {"staged": token, "rows": self._stage(directory, token)}
            except Refusal as refusal:
                return {"refusal": refusal.to_json()}

        return work

    def _stage(self, directory: Path, token: str) -> int:
        parts = find_save(self._store, directory)
        if self._durable is None:
            check_memory(parts)
            return sum(part.count for part in parts)
        try:
            return self._durable.stage(token, parts)
        except (OSError, ValueError) as error:
            raise _not_copied(directory, error) from None

    def load(self, message: Message) -> dict[str, Any]:
        """Replace all rows.

        Raises:
            Refusal: It cannot be done, and nothing was changed.
            ServerStateError: The server cannot go on, and has lost nothing.
        """
        directory = self._place.directory(message.control, Code.LOAD)
        if self._durable is None:
            change = build_aside(self._store, find_save(self._store, directory))
            return self._store.commit(message.head, change)
        staged = message.control.get("staged")
        try:
            path = None if staged is None else self._durable.take_staged(_token(staged))
            if path is None:
                path = self._durable.write_loaded(find_save(self._store, directory))
        except (OSError, ValueError) as error:
            raise _not_copied(directory, error) from None
        return {"rows": self._durable.load(message.head, path)}


def _token(found: object) -> str:
    if not isinstance(found, str) or not _TOKEN.fullmatch(found):
        raise Refusal(Code.LOAD, "what was staged is named by 16 hexadecimal digits")
    return found


def _not_copied(directory: Path, error: Exception) -> Refusal:
    return Refusal(
        Code.LOAD,
        f"{directory} cannot be loaded: its rows do not get into the server's own directory: "
        f"{error}. There must be room for them beside the last snapshot. Nothing was changed",
    )
