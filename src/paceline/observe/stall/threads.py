"""Where the threads of this process are, in words: called by its own watchdog, at a stall only.

Looks at frames and at the names in them; nothing is hooked, so a step costs nothing. Threads go on
running between two looks; what is said was so a moment ago. Must not wait, nor keep a frame.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from paceline.observe.records import Activity
from paceline.observe.stall.account import MAX_STACK
from paceline.observe.stall.locks import describe_lock_waits
from paceline.observe.stall.places import own_frame, walk_out
from paceline.observe.stall.probes import Probe
from paceline.observe.stall.stacks import fold

_FRAMES = 100
_LOADER = os.path.join("torch", "utils", "data")
_OPTIMIZERS = os.path.join("torch", "optim")
_AUTOGRAD = os.path.join("torch", "autograd", "graph.py")
_COMPILERS = (
    os.path.join("torch", "_dynamo", "convert_frame.py"),
    os.path.join("torch", "_inductor"),
)
_OWN_THREADS = ("paceline-watchdog", "paceline-watch")

WORDS = {
    Activity.STARTING: "before its first step",
    Activity.INPUT: "between two steps",
    Activity.FORWARD: "in forward",
    Activity.LOSS: "between forward and backward",
    Activity.BACKWARD: "in backward",
    Activity.WAITING: "waiting for other ranks",
    Activity.REDUCED: "between backward and optimizer.step",
    Activity.OPTIMIZER: "in optimizer.step",
    Activity.ENDED: "at its end",
}


@dataclass(frozen=True)
class ThreadReport:
    """What was seen.

    Attributes:
        where: What the thread that trains is doing.
        place: The user's file, line and function.
        collective: The collective that it is in.
        is_waiting: It does nothing but wait for other ranks.
        is_compiling: torch.compile is at work.
        locks: Threads that wait for locks.
        stack: Of all threads.
    """

    where: str
    place: str
    collective: str
    is_waiting: bool
    is_compiling: bool
    locks: str
    stack: str


def look_at_threads(activity: Activity, probes: Sequence[Probe]) -> ThreadReport:
    """Look at all threads of this process but our own."""
    frames = sys._current_frames()
    ident = _training_thread(probes)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    ours = {i for i, name in names.items() if name in _OWN_THREADS}
    found = {i: frame for i, frame in frames.items() if i not in ours}
    inner = found.get(ident)
    walked = list(walk_out(inner))
    inside = next((c for p in probes if (c := p.locate(ident)) is not None), None)
    return ThreadReport(
        where=_describe(activity, walked, probes),
        place=inside.place if inside is not None else _place(walked),
        collective=inside.call if inside is not None else "",
        is_waiting=inside is not None and inside.is_waiting,
        is_compiling=any(part in f.f_code.co_filename for f in walked for part in _COMPILERS),
        locks=describe_lock_waits(found, names),
        stack=_format(found, ident, names),
    )


def _training_thread(probes: Sequence[Probe]) -> int:
    main = threading.main_thread().ident or 0
    return next((probe.thread for probe in probes), main)


def _describe(activity: Activity, frames: Sequence[FrameType], probes: Sequence[Probe]) -> str:
    """Say what a thread does, from its innermost frame out.

    After a forward under ``no_sync`` nothing is recorded before the next one: its backward, and the
    loader, are found by their frames.
    """
    if activity not in (Activity.FORWARD, Activity.BACKWARD) and _is_in(frames, _LOADER):
        return "waiting for the data loader"
    if activity is Activity.LOSS and _is_in(frames, _AUTOGRAD):
        return WORDS[Activity.BACKWARD]
    if activity in (Activity.FORWARD, Activity.LOSS):
        module = _innermost_module(frames, probes)
        return f"in forward of {module}" if module else WORDS[activity]
    if activity in (Activity.REDUCED, Activity.INPUT) and _is_in(frames, _OPTIMIZERS):
        return WORDS[Activity.OPTIMIZER]
    return WORDS[activity]


def _innermost_module(frames: Sequence[FrameType], probes: Sequence[Probe]) -> str:
    torch: Any = sys.modules.get("torch")
    for frame in frames if torch is not None else ():
        own = frame.f_locals.get("self")
        if isinstance(own, torch.nn.Module):
            names = (probe.name_module(own) for probe in probes)
            return next((name for name in names if name), type(own).__name__)
    return ""


def _is_in(frames: Sequence[FrameType], part: str) -> bool:
    return any(part in frame.f_code.co_filename for frame in frames)


def _place(frames: Sequence[FrameType]) -> str:
    number = own_frame([frame.f_code.co_filename for frame in frames])
    if number < 0:
        return ""
    frame = frames[number]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def _format(frames: dict[int, FrameType], first: int, names: dict[int | None, str]) -> str:
    """All stacks, the thread that trains first; most recent call first, as faulthandler writes."""
    blocks = []
    for ident in sorted(frames, key=lambda each: each != first):
        role = " (trains)" if ident == first else ""
        lines = [f"Thread {names.get(ident, ident)}{role}, most recent call first:"]
        stack = traceback.StackSummary.extract(_numbered(frames[ident]), lookup_lines=False)
        lines += fold([f'  File "{f.filename}", line {f.lineno} in {f.name}' for f in stack])
        blocks.append("\n".join(lines))
    return "\n".join(blocks)[:MAX_STACK]


def _numbered(innermost: FrameType) -> Iterator[tuple[FrameType, int]]:
    for number, frame in enumerate(walk_out(innermost)):
        if number == _FRAMES:
            return
        yield frame, frame.f_lineno
