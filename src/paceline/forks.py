"""What a forked child must not do with what its parent has made.

A child inherits all objects, but no thread: who joins one, takes a lock that one held, or ends what
one looked after, waits for ever or acts for the parent. So

- finalizers act in the process that made them only (:func:`finalize_here`);
- what can be used asks :meth:`Owner.is_here` first, before it takes a lock;
- what has hooks, descriptors or threads of others in it is told, in the child, to let go of them
  (:func:`tell_children`).

Shared memory is looked after elsewhere, by the kernel and for forks from C too: [Note: forks] in
``native/group/mapping.c``. Called by all parts; must not know any.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

_MADV_WIPEONFORK = 18  # <linux/mman.h>, from 4.14 on; the module mmap does not have it


class _Asked:
    """Asks the system for the process id whenever somebody wants to know."""

    def __getitem__(self, _: int) -> int:
        return os.getpid()

    def __setitem__(self, _: int, value: int) -> None:
        """Nothing is kept."""


def _make_note() -> Any:
    """A place for a process id that reads as 0 in every child, however it was forked.

    To ask the system takes half a microsecond on some machines, several times a step.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page.madvise(_MADV_WIPEONFORK)
        return memoryview(page).cast("Q")
    return _Asked()


_note = _make_note()


class Owner:
    """The process that made something."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = _note[0] = os.getpid()

    def is_here(self) -> bool:
        """Say whether this is that process. Costs 0.1 microseconds."""
        return bool(_note[0] == self.pid)


class Inherited(Protocol):
    """Something that forked children inherit and must let go of."""

    def let_go(self) -> None:
        """Called in the child of a fork by Python. Must not wait, nor talk to anybody."""


_inherited: weakref.WeakSet[Any] = weakref.WeakSet()


def tell_children(thing: Inherited) -> None:
    """Call ``thing.let_go()`` in every child that Python forks while it lives."""
    _inherited.add(thing)


def finalize_here(
    thing: object, function: Callable[..., None], *arguments: Any
) -> weakref.finalize[Any, Any]:
    """``weakref.finalize``, but nothing happens in a forked child."""
    return weakref.finalize(thing, _call_here, Owner(), function, arguments)


def keep_for_ever(thing: object) -> None:
    """Have an object live as long as the process.

    For one whose destructor waits for threads that a forked child does not have: a gloo group's.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _call_here(owner: Owner, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    if owner.is_here():
        function(*arguments)


def _tell() -> None:
    things = list(_inherited)
    _inherited.clear()  # a child of the child has nothing more to let go of
    for thing in things:
        thing.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tell)
