"""The backend's collectives as torch's profilers show them: two events each, like those of gloo.

``c10d::allreduce_`` is the call, with the shapes of its tensors; ``paceline:all_reduce`` lasts from
the call until the collective is done. Called by :mod:`paceline.shm.backend.process_group`, only
while a profiler records.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from paceline.containers import tensors_in
from paceline.errors import CollectiveError
from paceline.shm.backend.flight_recorder import NAMES as TITLES
from paceline.shm.backend.work import FutureThread, SharedWork
from paceline.torch_private.profiler import record_inputs, record_until_done

# c10d's operators, where they are not the method's name and an underscore.
OPERATORS = {
    "all_gather_single": "_allgather_base_",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_",
    "all_to_all_single": "alltoall_base_",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier_",
}


class ProfiledCall:
    """One collective under a profiler. Enter it around the call, then :meth:`follow` the work."""

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        operator = OPERATORS.get(name, f"{name}_")
        self._call = record_inputs(f"c10d::{operator}", tensors_in(args))
        self._title = f"paceline:{TITLES.get(name, name)}"

    def __enter__(self) -> ProfiledCall:
        self._call.__enter__()
        self._done = record_until_done(self._title)
        return self

    def __exit__(self, *error: Any) -> None:
        self._call.__exit__(*error)
        if error[0] is not None:
            self._done.set_result(None)

    def follow(self, work: Any, futures: FutureThread) -> None:
        """End the event with the work; a work that is not ours has events of its own."""
        if not isinstance(work, SharedWork) or work.is_completed():
            self._done.set_result(None)
            return
        is_recorded = work.is_recorded = threading.Event()

        def end() -> None:
            with contextlib.suppress(CollectiveError):  # whoever waits for it hears of it
                work.wait_for_result()
            self._done.set_result(None)
            is_recorded.set()

        futures.submit(end)
