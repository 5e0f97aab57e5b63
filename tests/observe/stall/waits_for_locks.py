"""Threads that wait for locks in every way that bytecode has, found by locks.py.

Run by test_locks.py with each Python that is installed; it needs neither torch nor Paceline:

    python waits_for_locks.py .../observe/stall/locks.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

DEADLINE_S = 60
first, second, own = threading.Lock(), threading.RLock(), threading.Lock()
holder = SimpleNamespace(inner=SimpleNamespace(lock=first))


def as_global() -> None:
    with first:
        pass


def as_argument(_: int, lock: Any) -> None:
    with lock:
        pass


def with_argument(lock: Any, blocking: bool) -> None:
    lock.acquire(blocking)


def as_attribute(x: Any) -> None:
    with x.inner.lock:
        pass


def as_closure() -> None:
    lock = first

    def inside() -> None:
        with lock:
            pass

    inside()


def with_timeout() -> None:
    second.acquire(timeout=600)


def just_stored(lock: Any) -> None:
    if (mine := lock).acquire():
        mine.release()


def second_of_two(one: Any, other: Any) -> None:
    with one, other:
        pass


CASES: list[tuple[Callable[..., None], tuple[Any, ...], str]] = [
    (as_global, (), "lock first"),
    (as_argument, (1, first), "lock lock"),
    (with_argument, (first, True), "lock lock"),
    (as_attribute, (holder,), "lock x.inner.lock"),
    (as_closure, (), "lock lock"),
    (with_timeout, (), "lock second, held by thread MainThread"),
    (just_stored, (first,), "lock lock"),
    (second_of_two, (own, first), "lock other"),
]


def main(locks: Any) -> dict[str, str]:
    """Return what was said of each thread that was not told right, until the deadline."""
    first.acquire()
    second.acquire()
    threads = {}
    for function, arguments, _ in CASES:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        thread.start()
        threads[function.__name__] = thread
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    wrong = {function.__name__: "" for function, _, _ in CASES}
    until_s = time.monotonic() + DEADLINE_S
    while wrong and time.monotonic() < until_s:
        time.sleep(0.01)  # they may still be on their way
        frames = sys._current_frames()
        for function, _, words in CASES:
            ident = threads[function.__name__].ident
            told = locks.describe_lock_waits({ident: frames[ident]}, names)
            wrong[function.__name__] = told
            if f"waits for the {words}, " in told:
                del wrong[function.__name__]
    return wrong


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("locks", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["locks"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print(json.dumps(main(module)), flush=True)
    os._exit(0)  # threads wait for ever
