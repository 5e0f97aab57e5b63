"""torch's tests of DDP under distributed autograd, as test cases whose ranks are forked.

Imported before `swap.py` acts, so that torch's file is among the modules in which the class is
replaced. These tests are written for the CPU: nothing is pretended here, and no gate is opened.
"""

from __future__ import annotations

import unittest
from typing import Any

import torch.multiprocessing
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed import ddp_under_dist_autograd_test as tests
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)


def case_class(name: str) -> type[unittest.TestCase]:
    """Return torch's class of this name, run over TensorPipe with one process a rank."""
    wanted: Any = getattr(tests, name)

    class TorchDdpOverRpc(wanted, TensorPipeRpcAgentTestFixture, MultiProcessTestCase):
        @property
        def rpc_backend_options(self) -> Any:
            # Over sockets: TensorPipe's shared memory polls, and 6 processes that poll leave a
            # machine with few cores no time for the test.
            options = super().rpc_backend_options
            options._transports = ["uv"]
            return options

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TorchDdpOverRpc
