"""What is asked of the kernel, and how often."""

from __future__ import annotations

import pytest

from paceline.observe.process_usage import ProcessUsage


def test_a_run_delay_of_nothing_is_told_from_none_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = ProcessUsage()
    monkeypatch.setattr("paceline.observe.process_usage.os.listdir", lambda _: ["1"])
    for delay_ns, grows_by in ((7, 7), (7, 1), (9, 2)):
        monkeypatch.setattr("paceline.observe.process_usage._read_delay_ns", {"1": delay_ns}.get)
        before_ns = usage.run_delay_ns
        usage._read_delays()
        assert usage.run_delay_ns - before_ns == grows_by


class StoppedClock:
    """Time passes only where a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.cpu_s = 0.0


def test_a_reader_that_loses_its_core_asks_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it costs is CPU time: ten milliseconds without a core would be a pause of 40 seconds."""
    usage, clock = ProcessUsage(), StoppedClock()
    asked: list[float] = []

    def lose_the_core() -> None:
        asked.append(clock.now_s)
        clock.now_s += 0.010
        clock.cpu_s += 0.0002

    monkeypatch.setattr("paceline.observe.process_usage.time.monotonic", lambda: clock.now_s)
    monkeypatch.setattr("paceline.observe.process_usage.time.thread_time", lambda: clock.cpu_s)
    monkeypatch.setattr(usage, "_read_delays", lose_the_core)
    usage._next_s = usage._next_delays_s = 0.0
    assert usage.refresh()
    clock.now_s += 0.7  # 4000 times 0.2 ms are 0.8 s
    usage.refresh()
    assert len(asked) == 1
    clock.now_s += 0.2
    usage.refresh()
    assert len(asked) == 2
    assert usage.refresh(is_end=True), "the last steps would have no run delay"
    assert len(asked) == 3
