"""A rank ends: the others say how, in its own words where it had any."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.exit_reason import exit_reason_of
from paceline.native.extension import missing_reason

pytestmark = [
    pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason())),
    pytest.mark.timeout(170),
]

WORDS = ["raise", "process", "spawn", "handled", "raise/paceline", "handled/paceline"]
OTHERS = ["long", "sys.exit", "os._exit", "kill", "return"]


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, Any]]:
    """Every way to end, in one program: what ranks 0 and 2 were told about rank 1."""
    script = Path(__file__).with_name("ends_badly.py")
    command = [sys.executable, str(script), *WORDS, *OTHERS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=160)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("case", WORDS)
@pytest.mark.parametrize("rank", ["0", "2"])
def test_the_exception_is_told(told: dict[str, Any], case: str, rank: str) -> None:
    """Also to a rank that comes when another has ended because of it."""
    error = told[case][rank]
    assert (error["type"], error["rank"]) == ("PeerLostError", 1)
    assert "ValueError: layer 7 has no input" in error["text"]
    assert "\u2014 ünïcode\nsecond line" in error["text"]
    assert "\x1b" not in error["text"]
    assert "ends_badly.py:" in error["text"]
    assert "in end_by" in error["text"]
    assert "memory" not in error["text"]
    assert "PeerLostError" not in error["text"]


def test_a_long_message_is_cut(told: dict[str, Any]) -> None:
    text = told["long"]["0"]["text"]
    assert "ValueError: xxxxxxxx" in text
    assert len(text) < 2000


@pytest.mark.parametrize("case", ["sys.exit", "return"])
@pytest.mark.parametrize("rank", ["0", "2"])
def test_a_program_that_ends(told: dict[str, Any], case: str, rank: str) -> None:
    error = told[case][rank]
    assert (error["type"], error["rank"]) == ("PeerLostError", 1)
    # Whether a rank that is about to end has ended when it is missed is a matter of luck.
    assert "has left the group: " in error["text"]
    assert rank == "0" or "its program has ended without an exception" in error["text"]
    assert "memory" not in error["text"]


@pytest.mark.parametrize("case", ["os._exit", "kill"])
@pytest.mark.parametrize("rank", ["0", "2"])
def test_nothing_is_known(told: dict[str, Any], case: str, rank: str) -> None:
    error = told[case][rank]
    assert (error["type"], error["rank"]) == ("PeerLostError", 1)
    assert "has died without an exception of Python's" in error["text"]
    assert "lack of memory" in error["text"]


class TestWords:
    def test_the_cause_is_told_too(self) -> None:
        def fail() -> None:
            try:
                raise KeyError("first")
            except KeyError as error:
                raise RuntimeError("second") from error

        with pytest.raises(RuntimeError) as caught:
            fail()
        text = exit_reason_of(caught.value).text
        assert text.startswith("RuntimeError: second (")
        assert "after KeyError: 'first' (" in text
        assert "test_exit_reason.py:" in text

    def test_exit_in_a_handler_is_not_the_news(self) -> None:
        def fail() -> None:
            try:
                raise KeyError("first")
            except KeyError:
                sys.exit(1)

        with pytest.raises(SystemExit) as caught:
            fail()
        assert exit_reason_of(caught.value).text.startswith("KeyError: 'first'")

    def test_a_good_end_has_no_words(self) -> None:
        assert exit_reason_of(SystemExit(0)).text == ""
        assert exit_reason_of(SystemExit(3)).text == "SystemExit: 3"
