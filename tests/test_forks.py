"""``paceline.forks``: who made something, and what children are told."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from paceline import forks
from paceline.forks import Owner, finalize_here, keep_for_ever, tell_children
from paceline.native.extension import native
from tests.children import do_in_fork

C = ctypes.PyDLL(None)
WAYS: dict[str, Callable[[], int]] = {"os.fork": os.fork, "fork from C": C.fork}
if sys.platform == "linux" and os.uname().machine == "x86_64":
    WAYS["a system call"] = lambda: int(C.syscall(57))  # no handler of anybody's runs


class Thing:
    """Has references that can be weak."""

    def __init__(self) -> None:
        self.told = 0

    def let_go(self) -> None:
        self.told += 1


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_owner_is_in_one_process(
    way: str, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_asked:  # where the system cannot wipe memory
        monkeypatch.setattr(forks, "_note", forks._Asked())
    owner = Owner()
    assert owner.is_here()

    def look() -> None:
        assert not owner.is_here()
        assert Owner().is_here()
        assert not owner.is_here()

    assert do_in_fork(look, WAYS[way]) == 0
    assert owner.is_here()


def test_finalizers_act_at_home() -> None:
    done: list[str] = []
    things = [Thing(), Thing()]
    for thing in things:
        finalize_here(thing, done.append, "done")
    del thing

    def drop() -> None:
        things.clear()
        gc.collect()
        assert done == []

    assert do_in_fork(drop) == 0
    things.clear()
    assert done == ["done", "done"]


def test_children_are_told_once() -> None:
    thing, gone = Thing(), Thing()
    tell_children(thing)
    tell_children(gone)
    del gone

    def look() -> None:
        assert thing.told == 1
        assert do_in_fork(lambda: os._exit(thing.told)) == 1  # not a second time

    assert do_in_fork(look) == 0
    assert thing.told == 0


def test_what_is_kept_is_never_destroyed() -> None:
    done: list[str] = []

    class Loud:
        def __del__(self) -> None:
            done.append("destroyed")

    def keep() -> None:
        loud = Loud()
        keep_for_ever(loud)
        del loud
        gc.collect()
        assert done == []

    assert do_in_fork(keep) == 0


LOADED_TWICE = """
import importlib.machinery, importlib.util, os, sys
for name in ("one._native", "other._native"):
    loader = importlib.machinery.ExtensionFileLoader(name, sys.argv[1])
    spec = importlib.util.spec_from_file_location(name, sys.argv[1], loader=loader)
    loader.exec_module(importlib.util.module_from_spec(spec))
child = os.fork()
if child == 0:
    os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(native is None, reason="needs the native core: a C compiler")
def test_a_process_with_two_cores_can_fork() -> None:
    command = [sys.executable, "-c", LOADED_TWICE, native.__file__]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == "3\n", ended.stderr
