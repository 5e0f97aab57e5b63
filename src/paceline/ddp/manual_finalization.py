"""``finalize_backward()``: the program, not the backward, waits for the reductions (torch 2.15).

For work that can go on while gradients are reduced: a sparse exchange, the next batch. A base of
the wrapper; what happens to the step is in :mod:`paceline.ddp.reduce.manual_finish`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.ddp.state_names import StateNames
from paceline.errors import FinalizationError

if TYPE_CHECKING:
    from paceline.ddp.reduce.reducer import Reducer


class ManualFinalization(StateNames):
    """torch's names for steps that the program ends."""

    reducer: Reducer | None  # type: ignore[assignment]
    mixed_precision: Any
    _refuse_with_shards: Callable[[str], None]
    _require_manual_backward_finalization = False

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether ``finalize_backward()`` must be called after each synchronised backward."""
        return self._require_manual_backward_finalization

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self._refuse_with_shards("require_manual_backward_finalization")
            self._check_manual_backward_finalization_supported()
        if self.reducer is not None:
            self.reducer.runner.set_manual(bool(required))
        self._require_manual_backward_finalization = bool(required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether the next step can be finalized only once its backward has returned.

        Otherwise a hook inside of the backward may do it, after all gradients have arrived.
        """
        if self.reducer is None or not self._require_manual_backward_finalization:
            return False
        return self.mixed_precision is not None or self.reducer.runner.ends_after_backward

    def finalize_backward(self) -> None:
        """Wait for the reductions of the latest backward, and show their results in ``grad``.

        Raises:
            FinalizationError: If there is nothing to finalize, or gradients are still to come.
            StepError: If the step failed; on every rank.
        """
        self._check_manual_backward_finalization_supported()
        assert self.reducer is not None
        self.reducer.runner.finalize()

    def _check_manual_backward_finalization_supported(self) -> None:
        if self.reducer is None:
            raise FinalizationError(
                "Manual backward finalization is not supported when all DDP parameters use "
                "delay_all_reduce_named_params, or are reduced by a wrapper inside: there is no "
                "step here that could be held. Set it on the wrapper that reduces them."
            )

    def _restore_finalization(self) -> None:
        """After unpickling: the new reducer follows what the old one did."""
        if self._require_manual_backward_finalization and self.reducer is not None:
            self.reducer.runner.set_manual(True)
