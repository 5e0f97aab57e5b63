"""Steps as a history of Weights & Biases."""

from __future__ import annotations

from typing import Any, Protocol

from paceline.observe.metrics.values import step_values
from paceline.observe.records import StepRecord


class WandbRun(Protocol):
    """What is used of ``wandb.Run``."""

    def define_metric(self, name: str, *, step_metric: str) -> Any:
        """Say what a metric is drawn over."""

    def log(self, data: dict[str, Any]) -> Any:
        """Write one row."""


class WeightsAndBiases:
    """Writes every step to a run, which stays yours to finish. Works offline too.

    Rows have their own ``paceline/step``, so they may stand beside what your script logs.

    Args:
        run: What ``wandb.init(...)`` returned.
        prefix: What names begin with; a second wrapper of the process gets ``<prefix>1/``.

    Example::

        run = wandb.init(project="mine", mode="offline")
        paceline.observe.on_step(paceline.observe.metrics.WeightsAndBiases(run))
    """

    def __init__(self, run: WandbRun, prefix: str = "paceline") -> None:
        self._run = run
        self._prefix = prefix
        self._defined: set[str] = set()

    def __call__(self, record: StepRecord) -> None:
        """Write a step."""
        prefix = f"{self._prefix}{record.wrapper or ''}"
        if prefix not in self._defined:
            self._defined.add(prefix)
            self._run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")
        values = {f"{prefix}/{name}": value for name, value in step_values(record).items()}
        self._run.log(values | {f"{prefix}/step": record.step})
