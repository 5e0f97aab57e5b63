"""Import torch's `distributed_test` with its gates open.

Most DDP tests carry decorators that skip them without GPUs, and some are skipped by name ('fails in
our CI'). Decorators act when the module is imported, so they are replaced for the length of that
one import. Which tests do not run is then written in one place only, `expectations.py`.

The conditions that hold on gloo anyway (`require_backend_is_available`, `nccl_skip_if_lt_x_gpu`, …)
are left alone.
"""

from __future__ import annotations

import os
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import ModuleType
from typing import Any
from unittest import mock

Test = Callable[..., Any]

# The largest world size that any collected test asks for. `require_world_size` compares with it
# during the import; each run sets its own size afterwards.
IMPORT_WORLD_SIZE = 4


def import_distributed_test() -> ModuleType:
    """Import and return torch's test module, gates open, for the gloo backend."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(IMPORT_WORLD_SIZE))
    # Imported before the gates open: only what distributed_test itself decorates is to change.
    from torch.testing._internal import common_distributed, common_utils

    with _open_gates(common_distributed, common_utils):
        from torch.testing._internal.distributed import distributed_test
    return distributed_test


@contextmanager
def _open_gates(common_distributed: ModuleType, common_utils: ModuleType) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name in (
            (unittest, "skip"),
            (unittest, "skipIf"),
            (common_utils, "skip_but_pass_in_sandcastle"),
            (common_utils, "skip_but_pass_in_sandcastle_if"),
            (common_distributed, "skip_if_lt_x_gpu"),
        ):
            stack.enter_context(mock.patch.object(module, name, _gate_with_arguments))
        stack.enter_context(mock.patch.object(common_distributed, "skip_if_no_gpu", _gate))
        yield


def _gate_with_arguments(*_args: object, **_kwargs: object) -> Callable[[Test], Test]:
    return _gate


def _gate(test: Test) -> Test:
    # Not the bare test: torch's setUp reads `__wrapped__` of a test that it knows to be decorated.
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        return test(*args, **kwargs)

    return run
