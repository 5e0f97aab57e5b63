"""What a wrapper knows of a stall: names of modules, gradients and buckets awaited, collectives.

Made by :mod:`paceline.ddp.recording` for each wrapper, asked by the watchdog
(:mod:`paceline.observe.stall`), from its thread, at a stall only. It holds the wrapper weakly and
waits for nobody; what it reads may change while it reads.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import torch

from paceline.ddp.reduce.reducer import Reducer
from paceline.ddp.reduce.step_state import StepPhase
from paceline.forks import finalize_here
from paceline.native.extension import native
from paceline.observe.run_folder import RunFolder
from paceline.observe.stall.probes import InCollective, add_probe
from paceline.observe.stall.reductions import describe_reductions
from paceline.observe.stall.start import start_watchdog, stop_without_probes
from paceline.observe.step_recorder import StepRecorder
from paceline.printable import listed
from paceline.shm.core.dtypes import describe_request
from paceline.shm.diagnose.thread_location import locate_thread, watched_wait
from paceline.shm.diagnose.wait_monitor import WaitMonitor
from paceline.torch_private.profiler import flight_entries

_NAMED = 4
_COLLECTIVES = 8
_probes: weakref.WeakKeyDictionary[Reducer, StallProbe] = weakref.WeakKeyDictionary()


def watch_for_stalls(reducer: Reducer, module: torch.nn.Module, folder: str, rank: int) -> None:
    """Have the watchdog of this process know a wrapper; start it with the first."""
    probe = StallProbe(reducer, module)
    _probes[reducer] = probe
    add_probe(probe)
    start_watchdog(RunFolder(folder), rank)
    finalize_here(reducer, stop_without_probes)


class StallProbe:
    """One wrapper's: see :class:`paceline.observe.stall.probes.Probe`."""

    def __init__(self, reducer: Reducer, module: torch.nn.Module) -> None:
        self.thread = threading.get_ident()
        self._reducer = weakref.ref(reducer)
        self._module = weakref.ref(module)

    @property
    def is_alive(self) -> bool:
        """Whether the wrapper is still there."""
        return self._reducer() is not None

    def name_module(self, module: Any) -> str | None:
        """Return a module's name in the wrapper."""
        root = self._module()
        if root is None:
            return None
        for name, each in root.named_modules():
            if each is module:
                return name or type(module).__name__
        return None

    def awaited(self) -> str:
        """Say which gradients are to come, or for which bucket the step waits."""
        reducer = self._reducer()
        if reducer is None or reducer.runner.phase is not StepPhase.REDUCING:
            return ""
        if not reducer.clock.backward_ended:
            missing = [slot.spec.name for slot in reducer.runner.progress.missing()]
            return f"gradients to come: {listed(missing, _NAMED)}" if missing else ""
        for bucket, ended in zip(reducer.buckets, reducer.clock.ended, strict=False):
            if not ended:
                names = [slot.spec.name for slot in bucket.slots]
                return f"bucket {bucket.index} (of {len(reducer.buckets)}): {listed(names, _NAMED)}"
        return "the end of the step"

    def collectives(self) -> list[str]:
        """Tell the latest of each channel of shared memory, and those that c10d has recorded."""
        told = [line for monitor in WaitMonitor.all_open() for line in _of_monitor(monitor)]
        return [*told, *flight_entries(_COLLECTIVES)][:_COLLECTIVES]

    def reductions(self) -> list[str]:
        """Tell the latest reductions of buckets, over any transport."""
        reducer = self._reducer()
        observer = reducer.clock.observer if reducer is not None else None
        if reducer is None or not isinstance(observer, StepRecorder):
            return []
        return describe_reductions(observer, reducer.clock, _COLLECTIVES)

    def locate(self, thread: int) -> InCollective | None:
        """Say in which collective a thread is."""
        at = locate_thread(thread)
        if at is None:
            return None
        if not at.call:
            what = watched_wait(thread)
            return InCollective(what, at.place, True) if what else None
        own = next(iter(self.collectives()), "") if at.link else ""
        of = f" of group {at.group!r}" if at.group else ""
        return InCollective(f"{at.call}{of}{f' ({own})' if own else ''}", at.place, at.is_waiting)


def _of_monitor(monitor: WaitMonitor) -> list[str]:
    told = []
    for core in monitor.cores:
        row = core.row(monitor.index)
        ago_s = (time.monotonic_ns() - row.since_ns) / 1e9
        if row.life == native.LIFE_WORKING:
            told.append(f"{describe_request(row.request)}, in it for {ago_s:.1f} s")
        elif row.finished:
            told.append(f"{describe_request(row.request)}, done {ago_s:.1f} s ago")
    return told
