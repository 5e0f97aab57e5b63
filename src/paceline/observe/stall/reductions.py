"""The latest reductions of buckets of one wrapper, in words: over every transport.

Read at a stall, from what the recorder of the wrapper's steps still knows. Another thread may move
on meanwhile. Must not wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice

from paceline.observe.step_clock import StepClock
from paceline.observe.step_recorder import StepRecorder


def describe_reductions(recorder: StepRecorder, clock: StepClock, most: int) -> list[str]:
    """Return the newest first: those of the step under way, then those of the steps before.

    Args:
        recorder: Of the wrapper's steps.
        clock: Of the wrapper.
        most: How many.
    """
    of = f" of wrapper {recorder.wrapper}" if recorder.wrapper else ""
    return [f"{line}{of}" for line in islice(_lines(recorder, clock), most)]


def _lines(recorder: StepRecorder, clock: StepClock) -> Iterator[str]:
    steps = list(recorder.recent)
    if not steps or steps[-1].reductions_ended is not clock.ended:  # a step is under way
        yield from _of_step(recorder.step, recorder.reductions, clock.began, clock.ended)
    for each in reversed(steps):
        yield from _of_step(
            each.step, each.first_reduction, each.reductions_began, each.reductions_ended
        )


def _of_step(step: int, first: int, began: Sequence[int], ended: Sequence[int]) -> Iterator[str]:
    """Tell the reductions of a step that have begun, the last one first."""
    now_ns = time.perf_counter_ns()
    for index in reversed(range(len(began))):
        if not began[index]:
            continue
        bucket = f"bucket {index} (of {len(began)}) in step {step}"
        if ended[index]:
            took_ms = (ended[index] - began[index]) / 1e6
            took = f"done {(now_ns - ended[index]) / 1e9:.1f} s ago, took {took_ms:.1f} ms"
        else:
            took = f"under way for {(now_ns - began[index]) / 1e9:.1f} s"
        yield f"reduction #{first + index + 1}, {bucket}, {took}"
