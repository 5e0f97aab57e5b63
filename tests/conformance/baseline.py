"""What plain torch makes of its own tests on a CPU: read the record, or make it again.

`python -m tests.conformance.baseline` in the root of the repository runs every collected test, left
out or not, against torch's class and writes `torch_baseline_2.13.json`, or what the version of the
installed torch is. To be run with a new torch (`build/torch-2.15.0/bin/python`, which `make
test-torch` makes) or when the shim in `on_cpu.py` changes; a difference between the files is then a
thing to understand.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .client import Client
from .collect import collect
from .outcome import PASSED


@dataclass(frozen=True)
class Baseline:
    """The record: torch's version, the tests that passed, and why each of the others did not."""

    torch: str
    passed: list[str]
    not_passed: dict[str, str]


def installed_torch() -> str:
    """Return the version of torch without its build (`+cpu`)."""
    return torch.__version__.partition("+")[0]


def minor_version(version: str) -> str:
    """Return `2.15` for `2.15.0`: fixes of bugs have no record of their own."""
    return ".".join(version.split(".")[:2])


FILE = Path(__file__).with_name(f"torch_baseline_{minor_version(installed_torch())}.json")


def load() -> Baseline:
    """Return the checked-in record of the installed torch."""
    return Baseline(**json.loads(FILE.read_text()))


def measure() -> Baseline:
    """Run every collected test with torch's class, printing as it goes."""
    record = Baseline(installed_torch(), [], {})
    with Client("torch") as client:
        for test in collect().values():
            start = time.monotonic()
            outcome = client.run(test)
            print(f"{outcome.status:8}{time.monotonic() - start:6.1f} s  {test.name}", flush=True)
            if outcome.status == PASSED:
                record.passed.append(test.name)
            else:
                record.not_passed[test.name] = f"{outcome.status}: {outcome.cause}"
    return record


def main() -> None:
    """Measure and write the record."""
    start = time.monotonic()
    record = measure()
    FILE.write_text(json.dumps(asdict(record), indent=2) + "\n")
    print(
        f"{len(record.passed)} passed, {len(record.not_passed)} did not, "
        f"in {time.monotonic() - start:.0f} s; written to {FILE}"
    )


if __name__ == "__main__":
    main()
