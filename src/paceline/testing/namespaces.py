"""Network namespaces without names, and what is done inside them.

Called by :mod:`paceline.testing.hosts`. Knows the kernel's calls and how to run ``ip`` and ``tc``
in a namespace; must not know what hosts or ranks are.

[Note: no names]
A namespace lives as long as a process or a descriptor refers to it. ``ip netns add`` pins it to a
file under /run/netns, which stays there if the program that made it is killed. Here the only
reference is a descriptor of the caller: when the caller ends, in whatever way, SIGKILL included,
the kernel takes down the namespace with its devices and queues. To look inside from a shell:
``nsenter --net=/proc/<pid of the caller>/fd/<number>``.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000  # <linux/sched.h>
_COMMAND_TIMEOUT_S = 20.0
_OWN = "/proc/thread-self/ns/net"
_DEVICES = "/proc/thread-self/net/dev"


class Namespace:
    """One network namespace, held by a descriptor of this process. See [Note: no names]."""

    def __init__(self) -> None:
        self._descriptor = _in_own_thread(_unshare_and_open)

    @property
    def path(self) -> str:
        """A file that stands for the namespace, for this user's other processes too."""
        if self._descriptor < 0:
            raise RuntimeError("this network namespace is closed")
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def run(self, *command: str) -> None:
        """Run a program inside.

        Raises:
            OSError: If it fails, with what it said.
        """
        self.call(lambda: run_here(*command))

    def call(self, fn: Callable[[], T]) -> T:
        """Call a function on a thread that is inside, and return what it returns."""
        path = self.path

        def inside() -> T:
            enter(path)
            return fn()

        return _in_own_thread(inside)

    def close(self) -> None:
        """Let go; devices and queues inside vanish with the last process in it. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def enter(path: str) -> None:
    """Move the calling thread, and all threads that it will start, into a namespace.

    Raises:
        OSError: If the namespace is gone, or this user may not.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc().setns(descriptor, _CLONE_NEWNET), f"setns({path})")
    finally:
        os.close(descriptor)


def sent_bytes(device: str) -> int:
    """How many bytes a device of the calling thread's namespace has sent."""
    with open(_DEVICES) as table:
        for line in table:
            name, _, numbers = line.partition(":")
            if name.strip() == device:
                return int(numbers.split()[8])
    raise OSError(f"there is no network device {device} in this namespace")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _unshare_and_open() -> int:
    _check(_libc().unshare(_CLONE_NEWNET), "unshare(CLONE_NEWNET)")
    return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def run_here(*command: str) -> None:
    """Run a program in the calling thread's namespace.

    Raises:
        OSError: If it fails, with what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise OSError(f"{' '.join(command)} failed with code {done.returncode}: {said}")


def _in_own_thread(fn: Callable[[], T]) -> T:
    # A namespace belongs to a thread: one that has moved cannot be given back.
    results: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(fn())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, name="paceline-namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
