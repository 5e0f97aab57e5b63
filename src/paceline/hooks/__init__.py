"""Communication hooks."""

from paceline.hooks.quantized import QuantizedState, quantized_hook

__all__ = ["QuantizedState", "quantized_hook"]
