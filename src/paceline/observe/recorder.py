"""Writes the steps of all wrappers of a process into its file, and hands them to listeners.

Made by recording.py, fed by step_recorder.py. It follows training from inside and must never
disturb it: what goes wrong here turns recording off and is said once, in the log. Must not know who
makes wrappers.

[Note: when a record is written]
Training leaves nothing of the recorder in the caches, so the first record that is written takes as
long as ten that follow it. Steps that are over are therefore kept for 100 ms and written together,
with one status; at the end of the process at once, and at once if somebody listens. Only a forward
writes, also one of an evaluation. So a process that is killed loses the steps that ended in the
100 ms before its last forward, and the step that no forward has ended. What a rank does at this
moment is never delayed: it is a word of its own (:meth:`Recorder.set_activity`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from multiprocessing import util
from typing import Any

from paceline.exit_reason import ExitReason, add_listener
from paceline.forks import Owner, tell_children
from paceline.observe import ring_codec as codec
from paceline.observe.logged import LoggedValues, logged
from paceline.observe.process_usage import ProcessUsage
from paceline.observe.records import BucketInfo, Note, RankInfo, StepRecord
from paceline.observe.ring import EventWriter
from paceline.observe.ring_layout import ACTIVITY_BITS, STAMP_MASK, STATUS, STEP_MASK
from paceline.observe.step_clock import PlannedBucket, StepOutcome
from paceline.observe.step_recorder import NOBODY, PendingStep

logger = logging.getLogger("paceline")

_NEWEST_SHARE = 0.1
"""How much the newest step counts in the rates of the status."""

_WRITE_EVERY_NS = 100_000_000
"""[Note: when a record is written]."""
_LAST_RANK_EVERY_NS = 100_000_000
_DETAIL_BYTES = STATUS.body_bytes - codec.STATUS_HEAD.size
_FLAGS = {StepOutcome.SKIPPED: codec.SKIPPED, StepOutcome.JOINED: codec.JOINED}


class Recorder:
    """What this process records.

    Attributes:
        pending: Steps that are reduced and not over ([Note: when a step is over]).
        outermost: The wrapper whose forward runs, and not inside of another's; or NOBODY.
        is_evaluating: Its forward is none of a step.
        last_ended: When a step ended, the newest.
        listeners: Called with every step; must not raise.
        usage: What the kernel says of this process.
    """

    def __init__(self, writer: EventWriter | None) -> None:
        self.pending: list[PendingStep] = []
        self.outermost = NOBODY
        self.is_evaluating = False
        self.last_ended = 0
        self.usage = ProcessUsage()
        self.listeners: list[Callable[[StepRecord], None]] = []
        self.write_to(writer)
        self._owner = Owner()
        self._cpu_ns, self._faults = self.usage.cpu_ns, self.usage.major_faults
        self._delay_ns = self._stolen_ns = 0
        self._throttled_ns = self.usage.throttled_ns
        self._loss = math.nan
        self._duration = self._waited = self._samples = 0.0
        self._last_rank, self._next_last_rank_ns = -1, 0
        self._over: list[PendingStep] = []
        self._step = self._next_write_ns = 0
        self._has_ended = False
        add_listener(self)
        util.Finalize(None, self._on_end, exitpriority=0)
        tell_children(self)

    def write_to(self, writer: EventWriter | None) -> None:
        """Write into a file from now on; or into none."""
        self._writer = writer
        self._words: Any = writer.words if writer is not None else [0, 0]

    # --- every step ----------------------------------------------------------------------------

    def set_activity(self, activity: int, since_ns: int, step: int) -> None:
        """Say what this rank does now: ``EventWriter.set_activity``, inlined."""
        words = self._words
        words[1] = step
        words[0] = since_ns & STAMP_MASK | (step & STEP_MASK) << ACTIVITY_BITS | activity

    def add_pending(self, step: PendingStep, last_rank: Callable[[int], int] | None) -> None:
        """A step is reduced."""
        self.pending.append(step)
        if last_rank is not None and step.reduced >= self._next_last_rank_ns and step.sizes:
            # It reads the stamps of every rank: not in every step.
            self._next_last_rank_ns = step.reduced + _LAST_RANK_EVERY_NS
            self._last_rank = last_rank(len(step.sizes) - 1)

    def finish_steps(self, own: PendingStep | None, *, is_end: bool = False) -> None:
        """End ``own``, and every step whose optimizer has stepped; or all. Write what is due."""
        steps, self.pending = self.pending, []
        try:
            values = logged.take()
            for step in steps:
                if step is own or step.optimizer_ended or is_end:
                    self._finish(step, values)
                else:
                    self.pending.append(step)
        except Exception as error:
            self._turn_off(error)
        if is_end or self.listeners or time.perf_counter_ns() >= self._next_write_ns:
            self.write_steps(is_end=is_end)

    def write_if_due(self) -> None:
        """Write what is over if it has waited long enough: training may have paused."""
        if self._over and time.perf_counter_ns() >= self._next_write_ns:
            self.write_steps()

    def _finish(self, step: PendingStep, values: LoggedValues) -> None:
        step.is_over = True
        step.logged = values
        usage = self.usage
        if not step.optimizer_ended and usage.sample(time.perf_counter_ns()):
            step.cpu_ns, step.major_faults = usage.cpu_ns, usage.major_faults
        self._over.append(step)

    def write_steps(self, *, is_end: bool = False) -> None:
        """Write what is over ([Note: when a record is written])."""
        steps, self._over = self._over, []
        self._next_write_ns = time.perf_counter_ns() + _WRITE_EVERY_NS
        try:
            for step in steps[:-1]:
                self._write_step(step)
            if self.usage.refresh(is_end=is_end) and self.usage.throttled_ns > self._throttled_ns:
                self._note_throttled()
            for step in steps[-1:]:  # it has the run delay of all
                self._write_step(step)
            if self._writer is not None and steps:
                self._writer.write_status(self._encode_status())
        except Exception as error:
            self._turn_off(error)

    def _note_throttled(self) -> None:
        """The report names the quota instead of guessing why threads had no core."""
        lost_ns = self.usage.throttled_ns - self._throttled_ns
        self._throttled_ns = self.usage.throttled_ns
        self.note("throttled", f"the cgroup had no CPU quota left for {lost_ns / 1e6:.0f} ms")

    def _write_step(self, step: PendingStep) -> None:
        values = step.logged
        if values.samples is not None:
            step.samples = values.samples
        body = self._encode(step, values)
        ended = step.optimizer_ended or step.reduced
        self._average(ended - step.began, max(0, step.reduced - step.backward_ended), step.samples)
        self._step = step.step + 1
        if values.loss == values.loss:
            self._loss = values.loss
        if self._writer is not None:
            self._writer.append_step_body(body)
        if self.listeners:
            self._tell(body)

    def _encode(self, step: PendingStep, values: LoggedValues) -> bytes:
        usage = self.usage
        cpu_ns = faults = 0
        if step.cpu_ns:
            cpu_ns, faults = step.cpu_ns - self._cpu_ns, step.major_faults - self._faults
            self._cpu_ns, self._faults = step.cpu_ns, step.major_faults
        delay_ns = usage.run_delay_ns - self._delay_ns
        stolen_ns = usage.stolen_ns - self._stolen_ns
        self._delay_ns, self._stolen_ns = usage.run_delay_ns, usage.stolen_ns
        columns: tuple[Sequence[int], ...]
        columns = step.sizes, step.ready, step.reductions_began, step.reductions_ended
        count = len(step.sizes)
        if count > codec.MAX_BUCKETS:
            count = codec.MAX_BUCKETS
            columns = tuple(each[:count] for each in columns)
        sizes, ready, began, ended = columns
        body = codec.step_struct(count).pack(
            step.step,
            step.wrapper,
            count,
            len(values.numbers),
            0 if step.outcome is StepOutcome.REDUCED else _FLAGS[step.outcome],
            step.began,
            step.forward_began,
            step.forward_ended,
            step.backward_began,
            step.backward_ended,
            step.reduced,
            step.optimizer_began,
            step.optimizer_ended,
            values.loss,
            step.samples,
            cpu_ns,
            delay_ns,
            faults,
            stolen_ns,
            *sizes,
            *ready,
            *began,
            *ended,
        )
        return body + codec.encode_numbers(values.numbers) if values.numbers else body

    def _average(self, duration: float, waited: float, samples: float) -> None:
        """Keep means over the last steps, newer ones with more weight."""
        share = _NEWEST_SHARE if self._duration else 1.0
        self._duration += share * (duration - self._duration)
        self._waited += share * (waited - self._waited)
        self._samples += share * (samples - self._samples)

    def _encode_status(self, detail: bytes = b"") -> bytes:
        duration = self._duration
        head = codec.STATUS_HEAD.pack(
            self._step,
            time.perf_counter_ns(),
            self._loss,
            self._samples * 1e9 / duration if duration else 0.0,
            min(1.0, self._waited / duration) if duration else 0.0,
            self._last_rank,
            self.usage.rss_bytes,
        )
        return head + detail

    def _tell(self, body: bytes) -> None:
        record = codec.decode_step(body)
        assert record is not None
        for tell in list(self.listeners):
            tell(record)

    # --- now and then --------------------------------------------------------------------------

    def describe_buckets(self, wrapper: int, buckets: Sequence[PlannedBucket], step: int) -> None:
        """Keep what the buckets of a wrapper hold from this step on."""
        if self._writer is None:
            return
        try:
            self._writer.append_buckets(
                BucketInfo(
                    wrapper, index, each.nbytes, tuple(p.name for p in each.parameters), step
                )
                for index, each in enumerate(buckets)
            )
        except Exception as error:
            self._turn_off(error)

    def set_info(self, info: RankInfo) -> None:
        """More is known of this rank."""
        if self._writer is not None:
            self._writer.set_info(info)

    def note(self, kind: str, text: str) -> None:
        """Keep a note."""
        if self._writer is not None and self._owner.is_here():
            try:
                self._writer.append_note(Note(time.perf_counter_ns(), kind, text))
            except Exception as error:
                self._turn_off(error)

    def _turn_off(self, error: Exception) -> None:
        """Something is wrong with recording, and training goes on."""
        self.pending, self._over = [], []
        if self._writer is not None:
            self.write_to(None)
            logger.warning("recording is off from now on: %s: %s", type(error).__name__, error)

    # --- the end -------------------------------------------------------------------------------

    def on_process_exit(self, reason: ExitReason) -> None:
        """See :class:`paceline.exit_reason.Listener`. The first reason counts."""
        if self._has_ended or not self._owner.is_here():
            return
        self._has_ended = True
        self.finish_steps(None, is_end=True)
        if self._writer is not None:
            detail = reason.text.encode("utf-8", "replace")[:_DETAIL_BYTES]
            self._writer.write_status(self._encode_status(detail))
            self._writer.end(time.perf_counter_ns(), self._step)

    def _on_end(self) -> None:
        """The end of a process that multiprocessing has started: atexit has no part in it."""
        self.on_process_exit(ExitReason())

    def on_thread_exit(self, ident: int, reason: ExitReason) -> None:
        """See :class:`paceline.exit_reason.Listener`."""
        self.note("thread", f"a thread has ended with {reason.text}")

    def let_go(self) -> None:
        """In a forked child: the file is the parent's."""
        self.write_to(None)
        self.pending, self._over, self.listeners = [], [], []
