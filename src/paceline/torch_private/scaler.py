"""What a gradient scaler remembers of a step that is under way."""

from __future__ import annotations

from typing import Any

import torch


def forget_step(scaler: Any) -> None:
    """Let a scaler forget that gradients of this step were unscaled: they are dropped.

    ``update()`` does that at the end of a step, and nothing does after a step that failed.
    """
    if isinstance(scaler, torch.amp.GradScaler):
        scaler._per_optimizer_states.clear()
