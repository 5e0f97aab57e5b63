"""The recorder of this process: whether there is one, and who gets its steps.

There is one if ``PACELINE_RUN_DIR`` is set when the first wrapper is made (``paceline run`` sets
it; so may you, under torchrun), or once somebody calls :func:`on_step`; without a folder nothing is
written. Else wrappers are only remembered, and their clocks have no observer. A forked child has no
recorder; it may make one of its own.

Called by ddp/recording.py, and by users.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import util
from typing import Any

from paceline.forks import keep_for_ever, tell_children
from paceline.observe.logged import logged
from paceline.observe.recorder import Recorder
from paceline.observe.records import Activity, RankInfo, StepRecord
from paceline.observe.ring import EventWriter
from paceline.observe.run_folder import RUN_DIR, RunFolder
from paceline.observe.step_clock import StepClock
from paceline.observe.step_recorder import StepRecorder

METRICS_PORT = "PACELINE_METRICS_PORT"
"""The environment variable with the port of local rank 0; the next rank has the next port."""

logger = logging.getLogger("paceline")


@dataclass(frozen=True)
class Wrapper:
    """What has to be known of a wrapper to record it.

    Attributes:
        parameters: Those that it reduces.
        identify: Says which rank this is.
        on_attach: Called with the StepRecorder: optimizers have to tell it.
    """

    parameters: Sequence[Any]
    identify: Callable[[], RankInfo]
    on_attach: Callable[[StepRecorder], None]


class _Process:
    """What this process has: at most one recorder, and any number of wrappers."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.is_tried = False
        self.made = 0
        self.wrappers: weakref.WeakKeyDictionary[StepClock, Wrapper] = weakref.WeakKeyDictionary()
        tell_children(self)

    def attach(self, clock: StepClock, wrapper: Wrapper) -> None:
        recorder = self.recorder
        assert recorder is not None
        identify = wrapper.identify
        observer = StepRecorder(
            recorder, self.made, wrapper.parameters, lambda: recorder.set_info(identify())
        )
        self.made += 1
        clock.observer = observer
        wrapper.on_attach(observer)

    def start(self, writer: EventWriter | None) -> Recorder:
        if self.recorder is not None:  # somebody listens since before the first wrapper
            self.recorder.write_to(writer)
            return self.recorder
        self.recorder = Recorder(writer)
        logged.is_wanted = True
        for clock, wrapper in list(self.wrappers.items()):
            self.attach(clock, wrapper)
        return self.recorder

    def let_go(self) -> None:
        """In a forked child: wrappers of the parent are not recorded here."""
        for clock, wrapper in list(self.wrappers.items()):
            clock.observer = None
            keep_for_ever(wrapper)  # whatever it holds: destructors may wait
        self.recorder, self.is_tried = None, False
        self.wrappers.clear()
        logged.is_wanted = False
        tell_children(self)  # a child may make wrappers, and fork


_process = _Process()


def watch_wrapper(clock: StepClock, wrapper: Wrapper) -> None:
    """A wrapper was made: record it, now or when somebody wants its steps."""
    if not _process.is_tried:
        _process.is_tried = True
        _start_as_asked(wrapper)
    _process.wrappers[clock] = wrapper
    if _process.recorder is not None:
        _process.attach(clock, wrapper)


def _start_as_asked(wrapper: Wrapper) -> None:
    """Do what the environment asks for, with the first wrapper."""
    folder, port = os.environ.get(RUN_DIR), os.environ.get(METRICS_PORT)
    if folder:
        writer = _open(RunFolder(folder), wrapper.identify())
        if writer is not None:
            _process.start(writer)
    if port:
        _serve_metrics(port, wrapper.identify())


def _serve_metrics(port: str, info: RankInfo) -> None:
    """Serve this rank's metrics until the process ends. If it cannot be, training goes on."""
    from paceline.observe.metrics.open_metrics import OpenMetrics

    try:
        metrics = OpenMetrics(int(port) + info.local_rank, rank=info.rank)
    except (OSError, ValueError, OverflowError) as error:
        logger.warning(
            "rank %d serves no metrics: %s=%s plus the local rank %d: %s. Training goes on.",
            info.rank,
            METRICS_PORT,
            port,
            info.local_rank,
            getattr(error, "strerror", None) or error,
        )
        return
    util.Finalize(None, metrics.close, exitpriority=0)
    on_step(metrics)


def _open(folder: RunFolder, info: RankInfo) -> EventWriter | None:
    """Make this rank's file. If it cannot be made, say so; training does not need it."""
    try:
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        writer = EventWriter(folder.events(info.rank), info)
    except (OSError, ValueError) as error:
        logger.warning(
            "rank %d records nothing: its file in the run folder %s cannot be made: %s. Training "
            "goes on. Set %s to a folder that is writable and has %d MiB left for each rank, or "
            "unset it.",
            info.rank,
            folder.path,
            getattr(error, "strerror", None) or error,
            RUN_DIR,
            8,
        )
        return None
    writer.set_activity(Activity.STARTING, time.perf_counter_ns(), 0)
    return writer


def active_recorder() -> Recorder | None:
    """The recorder of this process, if it has one."""
    return _process.recorder


def note(kind: str, text: str) -> None:
    """Keep something that happened, in words, in this rank's file; without one nothing happens.

    Args:
        kind: One word, for example ``"warning"``.
        text: What happened.
    """
    if _process.recorder is not None:
        _process.recorder.note(kind, text)


class Handle:
    """A function that gets steps, until :meth:`remove`. Also a context manager."""

    def __init__(self, function: Callable[[StepRecord], None], recorder: Recorder) -> None:
        self._function = function
        self._recorder = recorder
        self._has_failed = False

    def call(self, record: StepRecord) -> None:
        """Hand over a step; what the function raises is said once."""
        try:
            self._function(record)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.exception(
                    "a function given to paceline.observe.on_step raised; it is called again with "
                    "the next step, and this is said once"
                )

    def remove(self) -> None:
        """Call the function no more. A step that waits for its end is handed over first."""
        recorder = self._recorder
        if self.call in recorder.listeners:
            if recorder.pending:
                recorder.finish_steps(None, is_end=True)
            recorder.listeners.remove(self.call)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def on_step(function: Callable[[StepRecord], None]) -> Handle:
    """Call ``function(record)`` with every step of every wrapper of this process.

    It is called by the thread that trains, in the next forward before its clock starts: never
    inside of a forward, a backward or a reduction. What it takes counts as input time. If it
    raises, that is logged once and training goes on.
    """
    recorder = _process.recorder or _process.start(None)
    handle = Handle(function, recorder)
    recorder.write_steps()  # those that were over before are not for it
    recorder.listeners.append(handle.call)
    return handle
