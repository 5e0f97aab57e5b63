"""Who descends from whom, as the kernel says."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch.kernel import descendants, orphans_ended
from tests.cli.launched import until
from tests.system import is_running

# Its first thread ends, as the first of many does that SIGKILL ends; another one stays.
HALF_ENDED = """
import ctypes, os, subprocess, sys, threading, time
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall(int(sys.argv[1]), 0)
"""
SYS_EXIT = {"x86_64": 60, "aarch64": 93}


@pytest.mark.skipif(platform.machine() not in SYS_EXIT, reason="the number of exit is not known")
def test_children_of_a_process_that_is_half_a_zombie() -> None:
    words = [sys.executable, "-c", HALF_ENDED, str(SYS_EXIT[platform.machine()])]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            until(lambda: not is_running(parent.pid), "the first thread did not end")
            assert child in descendants(os.getpid())
            assert parent.pid not in descendants(os.getpid())
        finally:
            os.kill(child, signal.SIGKILL)
            parent.kill()


def test_orphans_are_ended_and_others_are_not() -> None:
    with subprocess.Popen(["sleep", "600"]) as before:
        with orphans_ended():
            orphan = int(
                subprocess.run(
                    ["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
            )
            assert orphan in descendants(os.getpid())
        assert not is_running(orphan)
        assert is_running(before.pid)
        before.kill()
    assert not Path(f"/proc/{orphan}").exists()  # waited for
