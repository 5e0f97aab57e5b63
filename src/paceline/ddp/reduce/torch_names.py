"""Names of torch's C++ reducer, for those who reach for ``ddp.reducer``.

Lightning (manual optimisation), Accelerate (``trigger_sync_in_backward``) and
``torch.distributed.pipelining`` run forwards that are not synchronised, and then ask for one
backward that is. A base of :class:`paceline.ddp.reduce.reducer.Reducer`; must not know more of it
than what is declared here. Who calls which name: ``tests/ddp/wrapper/test_framework_names.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from paceline.ddp.reduce.context import Registrations
    from paceline.ddp.reduce.step_runner import StepRunner


class ReducerNames:
    """torch's names on our parts."""

    runner: StepRunner
    registered: Registrations
    prepare_forward: Callable[[], None]
    expect_backward: Callable[[], None]

    def prepare_for_forward(self) -> None:
        """Deal with what a step that failed has left."""
        self.prepare_forward()

    def prepare_for_backward(self, _outputs: Any) -> None:
        """Synchronise the next backward, whatever its forward said. It begins with a gradient.

        Outputs need not be given: with ``find_unused_parameters=True`` the engine is asked.
        """
        self.prepare_forward()
        self.expect_backward()

    def _rebuild_buckets(self) -> bool:
        """Deal with what a step that failed has left; buckets are cut anew in a backward only."""
        self.prepare_forward()
        return False

    def _delay_all_reduce(self) -> None:
        """Nothing is left to do: the first step of a static graph ends with its backward, too."""

    def _install_post_backward_futures(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        self.registered.futures.extend(futures)

    def _set_sparse_metadata(self, global_unique_ids: dict[str, torch.Tensor]) -> None:
        self.registered.sparse_rows = dict(global_unique_ids)

    def _remove_autograd_hooks(self) -> None:
        self.runner.hooks.remove()

    def _check_reducer_finalized(self) -> None:
        self.runner.check_finished()

    def _get_local_used_map(self) -> torch.Tensor:
        """How many ranks used each parameter in the latest step; torch's tests ask for it."""
        block = self.runner.block
        device = self.runner.planner.specs[0].device
        return torch.tensor(block.used if block else (), dtype=torch.int32, device=device)

    def _ddp_graph_static(self) -> bool:
        """Whether the same parameters went unused in every step so far; also for torch's tests."""
        return self.runner.context.usage.is_static
