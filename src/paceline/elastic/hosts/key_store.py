"""The stores in which ranks of several hosts meet: keys and values, for who knows the job's key.

Served by the first host's :mod:`~paceline.elastic.hosts.tunnel`, asked by
:class:`~paceline.elastic.hosts.private_store.PrivateStore`. Stores have names that are numbered
(``epoch-7``); those of old epochs and attempts are forgotten. Must not import torch.

A question is one line of JSON and then, after a newline, bytes: ``op``, ``keys``, and what the
operation needs. The answer has the same shape. Operations mean what they mean in ``dist.Store``.
"""

from __future__ import annotations

import contextlib
import json
import threading
from multiprocessing.connection import Connection
from typing import Any

from paceline.errors import MembershipError

MAX_BYTES = 16 << 20  # of a question
MAX_WAIT_S = 1.0
"""How long a question may wait for keys. To wait longer, ask again."""
_KEPT = 2  # stores of a kind, beside the newest
_WRONG = (MembershipError, KeyError, ValueError, TypeError, IndexError)


def pack(words: dict[str, Any], value: bytes = b"") -> bytes:
    """A question or an answer."""
    return json.dumps(words).encode() + b"\n" + value


def unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The other way round."""
    head, _, value = data.partition(b"\n")
    words = json.loads(head)
    if not isinstance(words, dict):
        raise MembershipError("what came from the other end is no question for a store")
    return words, value


class KeyStore:
    """One store; for any number of threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def answer(self, words: dict[str, Any], value: bytes) -> bytes:
        """Do one operation."""
        op, keys = words["op"], [str(key) for key in words["keys"]]
        with self._changed:
            if op == "wait":
                limit_s = min(float(words["limit_s"]), MAX_WAIT_S)
                return pack({"is": self._changed.wait_for(lambda: self._has(keys), limit_s)})
            if op == "check":
                return pack({"is": self._has(keys)})
            if op == "count":
                return pack({"number": len(self._values)})
            return self._change(op, keys[0], words, value)

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _change(self, op: str, key: str, words: dict[str, Any], value: bytes) -> bytes:
        """What concerns one key."""
        values = self._values
        if op == "get":
            return pack({"is": key in values}, values.get(key, b""))
        if op == "set":
            values[key], answer = value, pack({})
        elif op == "add":
            number = int(values.get(key, b"0")) + int(words["by"])
            values[key], answer = str(number).encode(), pack({"number": number})
        elif op == "compare_set":
            expected, wanted = value[: int(words["split"])], value[int(words["split"]) :]
            if values.get(key, b"") == expected:
                values[key] = wanted
            answer = pack({}, values.get(key, expected))
        elif op == "delete":
            answer = pack({"is": values.pop(key, None) is not None})
        else:
            raise MembershipError(f"a store does not know {op!r}")
        self._changed.notify_all()
        return answer


class KeyStores:
    """All stores of a job, by name."""

    def __init__(self) -> None:
        self._stores: dict[tuple[str, int], KeyStore] = {}
        self._newest: dict[str, int] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Those that there are."""
        return [f"{kind}-{number}" for kind, number in self._stores]

    def open(self, name: str) -> KeyStore:
        """Find a store; make it, if nobody has asked for it before.

        Raises:
            MembershipError: It was forgotten.
        """
        kind, _, digits = name.rpartition("-")
        number = int(digits)
        with self._lock:
            newest = self._newest[kind] = max(number, self._newest.get(kind, 0))
            for old in [o for o in self._stores if o[0] == kind and o[1] < newest - _KEPT]:
                del self._stores[old]
            if number < newest - _KEPT:
                raise MembershipError(f"the store {name} is over")
            return self._stores.setdefault((kind, number), KeyStore())

    def serve(self, name: str, pipe: Connection) -> None:
        """Answer one rank until it hangs up, or says what makes no sense."""
        with pipe, contextlib.suppress(OSError, EOFError, *_WRONG):
            store = self.open(name)
            while True:
                words, value = unpack(pipe.recv_bytes(MAX_BYTES))
                pipe.send_bytes(store.answer(words, value))
