"""Where steps can be sent, ready made: give one of these to :func:`paceline.observe.on_step`.

Each is a callable that takes a :class:`paceline.observe.StepRecord`. What it writes to is yours to
open and to close, :class:`OpenMetrics` aside, which has a ``close()``.
"""

from paceline.observe.metrics.open_metrics import OpenMetrics
from paceline.observe.metrics.tensorboard import TensorBoard
from paceline.observe.metrics.wandb import WeightsAndBiases

__all__ = ["OpenMetrics", "TensorBoard", "WeightsAndBiases"]
