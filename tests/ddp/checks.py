"""Many checks in one set of ranks: to start ranks takes longer than most checks.

A check is a function that runs in every rank. The ranks run all checks of a file, one after the
other, and say what became of each; the tests then look at that, one test per check.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from paceline.testing import run_ranks

F = TypeVar("F", bound=Callable[..., None])
Outcomes = dict[str, list[str]]


class Checks:
    """The checks of one file, in order of definition."""

    def __init__(self) -> None:
        self._checks: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._checks)

    def __call__(self, function: F) -> F:
        """Have a function run once."""
        self._checks[function.__name__] = (function, ())
        return function

    def each(self, *values: Any) -> Callable[[F], F]:
        """Have a function run once for each value."""

        def register(function: F) -> F:
            for number, value in enumerate(values):
                self._checks[f"{function.__name__}-{number}"] = (function, (value,))
            return function

        return register

    def run(self, world: int) -> Outcomes:
        """Run everything; return for each check the tracebacks of ranks where it failed."""
        told = run_ranks(world, run_all, self._checks, timeout_s=240)
        return {name: [t[name] for t in told if t[name]] for name in self.names}


def run_all(checks: dict[str, tuple[Callable[..., None], tuple[Any, ...]]]) -> dict[str, str]:
    """In a rank: run every check, whatever became of those before it."""
    told = {}
    for name, (function, arguments) in checks.items():
        try:
            function(*arguments)
            told[name] = ""
        except (Exception, pytest.fail.Exception):  # the second is no Exception
            told[name] = f"rank {dist.get_rank()}: {traceback.format_exc()}"
    return told


def assert_passed(outcomes: Outcomes, name: str) -> None:
    assert not outcomes[name], "\n".join(outcomes[name])
