"""``paceline.log``: numbers that a script says of its steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline import DistributedDataParallel as DDP
from paceline.errors import ArgumentTypeError, ConfigurationError
from tests.observe.recorded_training import make_model, record


def logging_loop() -> None:
    model = DDP(make_model())
    for step in range(3):
        loss = model(torch.randn(5, 4)).sum()
        if step != 1:
            paceline.log(loss=loss, samples=30, accuracy=step / 2)
            paceline.log(samples=torch.tensor(4), lr=torch.tensor([0.5]), top=step)
        loss.backward()
    paceline.log(loss=7)


def test_log(tmp_path: Path) -> None:
    (history,) = record(tmp_path, logging_loop, ranks=1)
    first, second, third = history.steps
    assert dict(first.numbers) == {"accuracy": 0.0, "lr": 0.5, "top": 0.0}
    assert (first.samples, second.samples, third.samples) == (34, 5, 34)
    assert second.numbers == ()
    assert math.isnan(second.loss)
    assert third.loss == 7.0
    assert dict(third.numbers)["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("numbers", "error", "words"),
    [
        ({"loss": "0.5"}, ArgumentTypeError, "loss=.* takes a number or a tensor with one element"),
        ({"loss": torch.ones(3)}, ArgumentTypeError, r"of shape \(3,\).*mean\(\)"),
        ({"samples": 1.5}, ConfigurationError, "takes a count, not 1.5"),
        ({"samples": -1}, ConfigurationError, "takes a count, not -1"),
        ({"x" * 65: 1.0}, ConfigurationError, "names of 64 bytes"),
        ({f"n{i}": 1.0 for i in range(33)}, ConfigurationError, "32 numbers"),
        ({"grad": None}, ArgumentTypeError, "not NoneType"),
    ],
)
def test_log_refuses_what_is_no_number(numbers: Any, error: Any, words: str) -> None:
    """Also where nobody records: a script must not fail under ``paceline run`` only."""
    with pytest.raises(error, match=words):
        paceline.log(**numbers)


def test_log_without_a_recorder_keeps_nothing() -> None:
    paceline.log(loss=torch.tensor(1.0, requires_grad=True), samples=3, other=True)
    assert paceline.observe.logged.logged.take() == paceline.observe.logged.LoggedValues()
