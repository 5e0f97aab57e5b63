"""Which threads of this process wait for a lock, found by what their frames are about to do.

A thread that waits in ``with lock:`` or ``lock.acquire()`` stands at that line; the names in the
line lead to the lock, and the lock says whether it is held. Nothing is called that a user wrote.
"""

from __future__ import annotations

import dis
import inspect
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

_LOCK = type(threading.Lock())
_RLOCK = type(threading.RLock())
_LOADS = re.compile(r"LOAD_(FAST|NAME|GLOBAL|DEREF|CLASSDEREF|FROM_DICT)")
"""Begins of opcodes: 3.13 and 3.14 have variants (``LOAD_FAST_BORROW``), and load two at once."""
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_ENTRIES = ("WITH", "LOAD_SPECIAL", "CALL")
_OWNER = re.compile(r"owner=(\d+)")


@dataclass(frozen=True)
class LockWait:
    """A thread that waits for a lock.

    Attributes:
        thread: Its ident.
        lock: What the program calls the lock.
        place: Where it waits.
        owner: The thread that holds it, where the lock knows; else 0.
    """

    thread: int
    lock: str
    place: str
    owner: int


def describe_lock_waits(frames: dict[int, FrameType], names: dict[int | None, str]) -> str:
    """Say which threads wait for locks; '' if none does."""
    waits = [wait for ident, frame in frames.items() if (wait := _find(ident, frame)) is not None]
    if not waits:
        return ""
    told = "; ".join(_tell(wait, names) for wait in waits)
    if len(waits) > 1:
        return f"a deadlock, it seems: {told}"
    return told


def _tell(wait: LockWait, names: dict[int | None, str]) -> str:
    held = f", held by thread {names.get(wait.owner, wait.owner)}" if wait.owner else ""
    who = names.get(wait.thread, wait.thread)
    return f"thread {who} waits for the lock {wait.lock}{held}, at {wait.place}"


def _find(ident: int, frame: FrameType) -> LockWait | None:
    """Return the lock for which a thread waits in its innermost frame."""
    try:
        candidates = list(_values_at(frame))
    except (ValueError, IndexError):
        return None
    for name, value in reversed(candidates):  # what was loaded last is entered
        if type(value) not in (_LOCK, _RLOCK):
            continue
        text = repr(value)  # C code: "<locked _thread.RLock object owner=140 count=1 at 0x7f>"
        if not text.startswith("<locked"):
            continue
        found = _OWNER.search(text)
        owner = int(found[1]) if found else 0
        if owner == ident:
            continue  # it has it
        code = frame.f_code
        place = f"{code.co_filename}:{frame.f_lineno}, in {code.co_name}"
        return LockWait(ident, name, place, owner)
    return None


def _values_at(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield what the current line loads before it enters or calls something, if it is doing so."""
    instructions = list(dis.get_instructions(frame.f_code))
    at = next((i for i, each in enumerate(instructions) if each.offset == frame.f_lasti), None)
    if at is None or not any(part in instructions[at].opname for part in _ENTRIES):
        return
    line = _line_begin(frame)
    name, value = "", None
    for each in instructions[:at]:
        if each.offset < line:
            continue
        if each.opname in _ATTRIBUTES and name:
            name = f"{name}.{each.argval}"
            value = _attribute(value, str(each.argval))
            yield name, value
        for loaded in names_loaded(each.opname, each.argval):
            name, value = loaded, _lookup(frame, loaded)
            yield name, value
        if name.endswith(".acquire"):
            name = ""


def names_loaded(opcode: str, argument: Any) -> list[str]:
    """Return the variables that an instruction loads, of any Python from 3.10 on."""
    if opcode == "STORE_FAST_LOAD_FAST":
        return [str(argument[1])]
    if not _LOADS.match(opcode):
        return []
    return [str(name) for name in argument] if isinstance(argument, tuple) else [str(argument)]


def _line_begin(frame: FrameType) -> int:
    """The offset of the first instruction of the current line (``starts_line`` became a bool)."""
    begins = (offset for offset, _ in dis.findlinestarts(frame.f_code))
    return max((offset for offset in begins if offset <= frame.f_lasti), default=0)


def _lookup(frame: FrameType, name: str) -> Any:
    if name in frame.f_locals:
        return frame.f_locals[name]
    return frame.f_globals.get(name)


def _attribute(value: Any, name: str) -> Any:
    """Read an attribute without running code of its class."""
    found = inspect.getattr_static(value, name, None)
    if inspect.ismemberdescriptor(found):  # __slots__
        return found.__get__(value)
    return found
