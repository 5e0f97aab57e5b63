"""Shards in turns: one runs at a time, in order, and an error of one ends all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from paceline.errors import ConfigurationError
from paceline.shards.turns import ShardStopped, Turns


class Log:
    """Writes down whose turn begins and ends."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def enter(self, position: int) -> None:
        self.lines.append(f"+{position}")

    def leave(self, position: int) -> None:
        self.lines.append(f"-{position}")


def run(
    count: int, job: Callable[[Turns[int], int], Any], log: Log | None = None
) -> tuple[list[Any], list[tuple[str, list[int]]]]:
    """Run a job for each of so many shards; return their results, and what was combined."""
    combined = []

    def combine(key: tuple[str, str], values: list[int]) -> list[int]:
        combined.append((" ".join(key), values))
        return [sum(values)] * len(values)

    turns: Turns[int] = Turns(range(10, 10 + count), log or Log(), combine)
    results = turns.run([lambda n=number: job(turns, n) for number in range(count)])  # type: ignore[misc]
    assert not any(thread.name.startswith("paceline shard") for thread in threading.enumerate())
    return results, combined


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_meet_in_order(count: int) -> None:
    def job(turns: Turns[int], number: int) -> int:
        first = turns.meet(("forward", "a"), number)
        return turns.meet(("backward", "a"), first + number)

    log = Log()
    results, combined = run(count, job, log)
    total = sum(range(count))
    assert combined[0] == ("forward a", list(range(count)))
    assert combined[1] == ("backward a", [total + number for number in range(count)])
    assert results == [count * total + total] * count
    cycle = [f"{sign}{number}" for number in range(count) for sign in "+-"]
    assert log.lines == cycle * 3


def test_who_meets_nobody_runs_after_the_other() -> None:
    log = Log()
    assert run(3, lambda _, number: number, log)[0] == [0, 1, 2]
    assert log.lines == ["+0", "-0", "+1", "-1", "+2", "-2"]


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("is_late", [False, True])
def test_an_error_ends_all(failing: int, is_late: bool) -> None:
    ended = []

    def job(turns: Turns[int], number: int) -> None:
        try:
            if is_late:
                turns.meet(("forward", "a"), number)
            if number == failing:
                raise KeyError("mine")
            turns.meet(("backward", "a"), number)
        except BaseException as error:
            ended.append((number, type(error)))
            raise

    with pytest.raises(KeyError, match="mine"):
        run(3, job)
    # One that had not begun never does.
    begun = range(3) if is_late else range(failing + 1)
    assert dict(ended) == {n: KeyError if n == failing else ShardStopped for n in begun}


def test_what_is_combined_may_fail() -> None:
    def combine(_: Any, __: list[int]) -> list[int]:
        raise OSError("gone")

    turns: Turns[int] = Turns(range(2), Log(), combine)
    with pytest.raises(OSError, match="gone"):
        turns.run([lambda: turns.meet(("forward", "a"), 1)] * 2)


@pytest.mark.parametrize("odd", [0, 1])
def test_other_layers(odd: int) -> None:
    def job(turns: Turns[int], number: int) -> None:
        turns.meet(("the forward", "b" if number == odd else "a"), number)

    names = ["a", "a"]
    names[odd] = "b"
    told = f"shard 10: the forward of {names[0]}, shard 11: the forward of {names[1]}"
    with pytest.raises(ConfigurationError, match=told):
        run(2, job)


@pytest.mark.parametrize("odd", [0, 1])
def test_one_has_ended(odd: int) -> None:
    def job(turns: Turns[int], number: int) -> None:
        if number != odd:
            turns.meet(("the forward", "a"), number)

    with pytest.raises(ConfigurationError, match=f"shard {10 + odd}: at its end"):
        run(2, job)


def test_nobody_goes_on_who_has_caught_the_error() -> None:
    def job(turns: Turns[int], number: int) -> None:
        if number == 1:
            raise KeyError("mine")
        for _ in range(3):
            with pytest.raises(ShardStopped, match="Shard 10 cannot go on"):
                turns.meet(("forward", "a"), number)

    with pytest.raises(KeyError):
        run(2, job)
