"""Which optimizer a table has: frozen policies. They run on the server (``ps/state/updates.py``).

``lr`` travels with every push, so a trainer may change it from step to step
(``EmbeddingBag.lr``); everything else is fixed when the table is made.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from paceline.errors import ConfigurationError

_IN_TORCHS_WORDS = {"lr": "learning rate", "eps": "epsilon value"}


@dataclass(frozen=True)
class _Policy:
    """What all optimizers check: numbers are finite, and not negative."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, (int, float)) and math.isfinite(value) and value >= 0
            if not is_number and field.name != "betas":
                what = _IN_TORCHS_WORDS.get(field.name, f"{field.name} value")
                raise ConfigurationError(
                    f"{type(self).__name__}: Invalid {what}: {value!r}. {field.name} must be a "
                    "number of at least 0"
                )


@dataclass(frozen=True)
class SGD(_Policy):
    """``torch.optim.SGD`` without momentum.

    Args:
        lr: Learning rate.
    """

    lr: float = 0.01


@dataclass(frozen=True)
class Adagrad(_Policy):
    """``torch.optim.Adagrad``: one sum of squares for each value.

    Args:
        lr: Learning rate.
        eps: Added to the root.
        initial_accumulator_value: What the sums begin with.
    """

    lr: float = 0.01
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0


@dataclass(frozen=True)
class RowwiseAdagrad(_Policy):
    """Adagrad with one sum for each row: the mean of the squares of its gradient.

    Args:
        lr: Learning rate.
        eps: Added to the root.
        initial_accumulator_value: What the sums begin with.
    """

    lr: float = 0.01
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0


@dataclass(frozen=True)
class Adam(_Policy):
    """``torch.optim.SparseAdam``: only rows with a gradient move, the step counts pushes.

    Args:
        lr: Learning rate.
        betas: Decay of the two means.
        eps: Added to the root.
    """

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        first, second = self.betas
        for index, beta in enumerate((first, second)):
            if not 0.0 <= beta < 1.0:
                raise ConfigurationError(
                    f"Adam: Invalid beta parameter at index {index}: {beta}. betas must be two "
                    "numbers in [0, 1)"
                )


Optimizer = SGD | Adagrad | RowwiseAdagrad | Adam
OPTIMIZERS: dict[str, type[Optimizer]] = {
    kind.__name__: kind for kind in (SGD, Adagrad, RowwiseAdagrad, Adam)
}
