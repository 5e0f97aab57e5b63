"""Reads the tables of hops from the pages 'The life of ...' and records which functions ran.

A hop is a row of a table: `file` and `function` in two columns, in the order in which they run.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"
ROW = re.compile(r"^\|[^|]*\| `([\w/]+\.(?:py|c))` \| `(\w+)` \|", re.MULTILINE)

Call = tuple[int, str, str]
"""When (in ns of the monotonic clock, which all processes share), in which file, which function."""


@dataclass(frozen=True)
class Hop:
    """One row: the file, from ``src/paceline``, and the function."""

    file: str
    function: str

    @property
    def is_native(self) -> bool:
        return self.file.endswith(".c")

    def is_defined(self) -> bool:
        path = SOURCE / self.file
        keyword = r"^\w.*\b" if self.is_native else r"\bdef "
        pattern = rf"{keyword}{self.function}\("
        return path.exists() and re.search(pattern, path.read_text(), re.MULTILINE) is not None


def hops_of(page: str) -> list[Hop]:
    """The hops of a page in ``docs/``, in its order."""
    return [Hop(*row) for row in ROW.findall((ROOT / "docs" / page).read_text())]


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Note every call of a function of the package on this thread."""
    calls: list[Call] = []
    prefix = f"{SOURCE}/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(prefix):
            called = (time.monotonic_ns(), name.removeprefix(prefix), frame.f_code.co_name)
            calls.append(called)

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def check_walk(page: str, calls: Sequence[Call]) -> None:
    """Every hop of the page was called, after the one before it."""
    hops = hops_of(page)
    assert hops, f"docs/{page} has no table of hops"
    unknown = [hop for hop in hops if not hop.is_defined()]
    assert not unknown, f"docs/{page} names functions that are not there: {unknown}"
    left = iter(sorted(calls))
    for number, hop in enumerate([hop for hop in hops if not hop.is_native], 1):
        found = any((file, name) == (hop.file, hop.function) for _, file, name in left)
        ran = [name for _, file, name in sorted(calls) if file == hop.file]
        assert found, (
            f"docs/{page}: {hop} (Python hop {number}) did not run after the one before it; "
            f"of its file ran {ran}"
        )


def check_not_python(calls: Sequence[Call], instead_of_c: Collection[tuple[str, str]]) -> None:
    """The native core did its hops: what Python has in their place did not run."""
    ran = {(file, name) for _, file, name in calls} & set(instead_of_c)
    assert not ran, f"Python did what the page says the native core does: {sorted(ran)}"
