"""torch's own DDP tests, each as one pytest test, against the class that CONFORMANCE_CLASS names.

With `paceline` (the default) every test must pass that `expectations.py` does not leave out. With
`torch` every test must end as the checked-in baseline says.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from . import baseline
from .client import DEADLINE_S, Client
from .collect import TorchTest, collect
from .expectations import LEFT_OUT, OVER_THE_GROUP, WAITS
from .outcome import PASSED

CLASS = os.environ.get("CONFORMANCE_CLASS", "paceline")

# The server ends a test by itself: this is only for a server that hangs.
pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


def _parameter(test: TorchTest) -> Any:
    if CLASS == "torch" or test.name not in LEFT_OUT:
        return pytest.param(test, id=test.name)
    reason, note = LEFT_OUT[test.name]
    text = f"{reason.value}: {note}" if note else reason.value
    return pytest.param(test, id=test.name, marks=pytest.mark.skip(reason=text))


@pytest.mark.parametrize("test", [_parameter(test) for test in collect().values()])
def test_torch_ddp(client: Client, test: TorchTest) -> None:
    defaults = {}
    if CLASS == "paceline" and test.name in WAITS:
        defaults["missing_gradients"] = "wait"
    if CLASS == "paceline" and test.name in OVER_THE_GROUP:
        defaults["transport"] = "c10d"
    outcome = client.run(test, **defaults)
    if (outcome.status == PASSED) != _must_pass(test.name):
        pytest.fail(f"{test.name} {outcome.status} with {CLASS}\n{outcome.detail}", pytrace=False)


def _must_pass(name: str) -> bool:
    return CLASS != "torch" or name in baseline.load().passed
