"""Steps as scalars of TensorBoard."""

from __future__ import annotations

from typing import Protocol

from paceline.observe.metrics.values import step_values
from paceline.observe.records import StepRecord


class ScalarWriter(Protocol):
    """What is used of ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Write one number."""


class TensorBoard:
    """Writes every step to a ``SummaryWriter``, which stays yours to close.

    Args:
        writer: A ``torch.utils.tensorboard.SummaryWriter``; with several ranks, one for each.
        prefix: What tags begin with; a second wrapper of the process gets ``<prefix>1/``.

    Example::

        writer = SummaryWriter(f"runs/rank{rank}")
        paceline.observe.on_step(paceline.observe.metrics.TensorBoard(writer))
    """

    def __init__(self, writer: ScalarWriter, prefix: str = "paceline") -> None:
        self._writer = writer
        self._prefix = prefix

    def __call__(self, record: StepRecord) -> None:
        """Write a step."""
        prefix = f"{self._prefix}{record.wrapper or ''}"
        for name, value in step_values(record).items():
            self._writer.add_scalar(f"{prefix}/{name}", value, record.step)
