"""pytest's end of the test server: start it, have it run tests, end it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from .collect import TorchTest
from .outcome import Outcome, Request

DEADLINE_S = 250
PACKAGE = __package__ or "conformance"
# The folder in which `python -m PACKAGE` finds this package, under whatever name it was imported.
ROOT = Path(__file__).resolve().parents[len(PACKAGE.split("."))]


class Client:
    """A test server for one class under test; use as a context manager.

    Args:
        choice: 'torch' or 'paceline', the class that is put in torch's place.
    """

    def __init__(self, choice: str) -> None:
        self.choice = choice
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE}.server", choice],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
        )

    def __enter__(self) -> Client:
        try:
            self._receive()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server, and the test it may be running."""
        self._process.send_signal(signal.SIGINT)
        with self._process:  # closes the pipes and waits
            pass

    def run(self, test: TorchTest, **defaults: Any) -> Outcome:
        """Run one test.

        Args:
            test: the test, with the number of ranks that it needs.
            defaults: keyword arguments for the class under test where the test gives none.
        """
        request = Request(test.name, test.test_class, test.world_size, DEADLINE_S, defaults)
        requests = _pipe(self._process.stdin)
        requests.write(json.dumps(asdict(request)) + "\n")
        requests.flush()
        return Outcome(**json.loads(self._receive()))

    def _receive(self) -> str:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError(
                f"the test server for {self.choice!r} ended with code {self._process.wait()}; "
                "what it wrote on stderr says why"
            )
        return line


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _environment() -> dict[str, str]:
    """Return the environment of the server: one thread a rank, and this package to be found."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # torch's advice on how to repeat a failure does not fit here; README.md says how.
        "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
    }
