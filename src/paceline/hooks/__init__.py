"""Communication hooks: what a bucket's reduction may be replaced with.

torch's hooks under torch's names, and what torch lacks. They run on Paceline's DDP and on torch's::

    from paceline import hooks
    state = hooks.register(ddp, "int8")

See docs/hooks.md for what each sends and when to use it.
"""

from paceline.hooks.averagers import (
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
)
from paceline.hooks.choose import Choice, HookCost, choose
from paceline.hooks.compress import (
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from paceline.hooks.diloco import DiLoCoOptimizer, DiLoCoState, diloco_hook
from paceline.hooks.local_sgd import (
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    post_localSGD_hook,
)
from paceline.hooks.powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from paceline.hooks.quantize import quantization_perchannel_hook, quantization_pertensor_hook
from paceline.hooks.quantized import QuantizedState, quantized_hook
from paceline.hooks.registry import DDPCommHookType, register, register_ddp_comm_hook
from paceline.hooks.state import HookState
from paceline.hooks.topk import TopKState, topk_hook
from paceline.hooks.uncompressed import allreduce_hook, noop_hook

__all__ = [
    "Choice",
    "DDPCommHookType",
    "DiLoCoOptimizer",
    "DiLoCoState",
    "HierarchicalModelAverager",
    "HookCost",
    "HookState",
    "ModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "PowerSGDState",
    "QuantizedState",
    "TopKState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "choose",
    "diloco_hook",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "quantized_hook",
    "register",
    "register_ddp_comm_hook",
    "topk_hook",
]
