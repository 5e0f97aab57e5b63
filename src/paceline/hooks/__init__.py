"""Communication hooks."""

from paceline.hooks.powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from paceline.hooks.quantized import QuantizedState, quantized_hook

__all__ = [
    "PowerSGDState",
    "QuantizedState",
    "batched_powerSGD_hook",
    "powerSGD_hook",
    "quantized_hook",
]
