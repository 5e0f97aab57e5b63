"""What the kernel says of this process: CPU time, page faults, time without a core, memory.

Called by the recorder. CPU time and faults cost two microseconds, and ten in training, which leaves
nothing of this in the caches: they are asked for every 50 ms, so in every step that is not shorter.
Threads without a core cost several microseconds *each*, and memory ten: they are asked for so
seldom that it costs a four-thousandth of the time, at most. Must not know what the numbers are for.

The cost is this thread's CPU time: one that loses its core while it asks takes milliseconds, and
would then ask no more for a minute, just where there is something to tell.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path

from paceline.cores import find_cpu_stat, read_stolen_ns, read_throttled_ns

_SHARE_OF_TIME = 1 / 4000
_MIN_PAUSE_S = 0.1
_SAMPLE_EVERY_NS = 50_000_000
_MEMORY_EVERY_S = 1.0
_TASKS = Path("/proc/self/task")
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = resource.getpagesize()


class ProcessUsage:
    """What this process has used. Numbers only grow, memory aside.

    Attributes:
        cpu_ns: CPU time of all threads; from the last time it was asked for.
        major_faults: Pages that had to come from disk; from the same time.
        run_delay_ns: How long threads were ready to run and had no core; from the last time it was
            asked for. It grows by 1 at least, each time.
        throttled_ns: How long its cgroup had no CPU quota left, not older than a second.
        stolen_ns: How long the hypervisor kept its cores, in the mean over those that it may use;
            not older than a second. It grows by 1 at least, each time that it is asked for.
        rss_bytes: Memory, not older than a second if somebody calls :meth:`refresh`.
    """

    def __init__(self) -> None:
        self.cpu_ns = 0
        self.major_faults = 0
        self.run_delay_ns = 0
        self.throttled_ns = 0
        self.stolen_ns = 0
        self.rss_bytes = 0
        self._cpu_stat = find_cpu_stat()
        self._stolen_before_ns = read_stolen_ns()
        self._delays_ns: dict[str, int] = {}
        self._next_sample_ns = 0
        self._next_s = self._next_delays_s = self._next_memory_s = 0.0
        self.sample(time.perf_counter_ns())
        self.refresh()
        self.run_delay_ns = self.stolen_ns = 0  # before this object was made

    def sample(self, now_ns: int) -> bool:
        """Ask for what is cheap, if the last time was long enough ago; say whether it was."""
        if now_ns < self._next_sample_ns:
            return False
        self._next_sample_ns = now_ns + _SAMPLE_EVERY_NS
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.cpu_ns = int((usage.ru_utime + usage.ru_stime) * 1e9)
        self.major_faults = usage.ru_majflt
        return True

    def refresh(self, *, is_end: bool = False) -> bool:
        """Ask for the rest, if it is time to or for the last time; say whether it did."""
        now_s = time.monotonic()
        if now_s < self._next_s and not is_end:
            return False
        if now_s >= self._next_delays_s or is_end:
            began_s = time.thread_time()
            self._read_delays()
            took_s = time.thread_time() - began_s
            self._next_delays_s = now_s + max(_MIN_PAUSE_S, took_s / _SHARE_OF_TIME)
        if now_s >= self._next_memory_s or is_end:
            began_s = time.thread_time()
            self._read_now_and_then()
            took_s = time.thread_time() - began_s
            self._next_memory_s = now_s + max(_MEMORY_EVERY_S, took_s / _SHARE_OF_TIME)
        self._next_s = min(self._next_delays_s, self._next_memory_s)
        return True

    def _read_now_and_then(self) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            self.rss_bytes = int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
        if self._cpu_stat is not None:
            self.throttled_ns = read_throttled_ns(self._cpu_stat)
        stolen_ns = read_stolen_ns()
        self.stolen_ns += max(1, stolen_ns - self._stolen_before_ns)
        self._stolen_before_ns = stolen_ns

    def _read_delays(self) -> None:
        """Add what each thread was delayed; threads come and go, so the sum is not enough."""
        delays_ns = {}
        with contextlib.suppress(OSError):
            for thread in os.listdir(_TASKS):
                delays_ns[thread] = _read_delay_ns(thread)
        before = self._delays_ns
        more_ns = sum(
            max(0, delay_ns - before.get(thread, 0)) for thread, delay_ns in delays_ns.items()
        )
        self.run_delay_ns += max(1, more_ns)  # whoever sees it grow knows that it was asked for
        self._delays_ns = delays_ns


def _read_delay_ns(thread: str) -> int:
    """The second number of schedstat; 0 for a thread that has ended, or without schedstat."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        descriptor = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int(os.read(descriptor, 100).split()[1])
        finally:
            os.close(descriptor)
    return 0
