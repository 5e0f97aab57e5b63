"""Run one of torch's tests: a test case whose ranks are forked instead of started afresh.

Runs in a process of its own, forked by `server.py` from one that has torch and its tests loaded.
The environment that a test sets therefore reaches its ranks by itself. Forking is sound here
because the loaded process has run no torch operation and has a single thread.
"""

from __future__ import annotations

import os
import unittest
from types import ModuleType
from typing import Any

import torch.multiprocessing
from torch.testing._internal import common_distributed

from . import rpc
from .collect import TEST_CLASS
from .on_cpu import on_cpu
from .outcome import FAILED, PASSED, SKIPPED, Outcome, Request


def run_case(distributed_test: ModuleType, request: Request) -> Outcome:
    """Run the requested test; at the deadline torch ends it and shows the stacks of its ranks."""
    os.environ["WORLD_SIZE"] = str(request.world_size)
    common_distributed.TIMEOUT_DEFAULT = request.deadline_s
    common_distributed.TIMEOUT_OVERRIDE.clear()
    result = unittest.TestResult()
    if request.test_class == TEST_CLASS:
        case_class = _case_class(distributed_test)
    else:
        case_class = rpc.case_class(request.test_class)
    unittest.TestSuite([case_class(request.name)]).run(result)
    return _outcome(result)


def _case_class(distributed_test: ModuleType) -> type[unittest.TestCase]:
    backend: Any = distributed_test.TestDistBackend
    tests: Any = distributed_test.DistributedTest._DistTestBase

    class TorchDdp(backend, tests):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *args: Any, **kwargs: Any) -> None:
            with on_cpu(distributed_test):
                super()._run(*args, **kwargs)

    return TorchDdp


def _outcome(result: unittest.TestResult) -> Outcome:
    if result.errors or result.failures:
        return Outcome(FAILED, "\n".join(text for _, text in result.errors + result.failures))
    if result.skipped:
        return Outcome(SKIPPED, "\n".join(reason for _, reason in result.skipped))
    return Outcome(PASSED)
