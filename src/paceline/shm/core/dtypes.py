"""How torch's dtypes and operations are called in the native core, and its records in words."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import CollectiveInputError
from paceline.native.extension import native

DTYPES: dict[torch.dtype, int] = {}
OPS: dict[object, int] = {}
if native is not None:
    DTYPES = {
        torch.uint8: native.DTYPE_U8,
        torch.int8: native.DTYPE_I8,
        torch.int16: native.DTYPE_I16,
        torch.int32: native.DTYPE_I32,
        torch.int64: native.DTYPE_I64,
        torch.float16: native.DTYPE_F16,
        torch.bfloat16: native.DTYPE_BF16,
        torch.float32: native.DTYPE_F32,
        torch.float64: native.DTYPE_F64,
        torch.bool: native.DTYPE_BOOL,
        torch.complex64: native.DTYPE_C64,
        torch.complex128: native.DTYPE_C128,
    }
    OPS = {
        dist.ReduceOp.SUM: native.OP_SUM,
        dist.ReduceOp.AVG: native.OP_AVG,
        dist.ReduceOp.PRODUCT: native.OP_PRODUCT,
        dist.ReduceOp.MIN: native.OP_MIN,
        dist.ReduceOp.MAX: native.OP_MAX,
        dist.ReduceOp.BAND: native.OP_BAND,
        dist.ReduceOp.BOR: native.OP_BOR,
        dist.ReduceOp.BXOR: native.OP_BXOR,
    }

_DTYPE_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in DTYPES.items()}
_OP_NAMES = {code: str(op).rpartition(".")[2].lower() for op, code in OPS.items()}
_LINEAR = {OPS.get(dist.ReduceOp.SUM), OPS.get(dist.ReduceOp.AVG)}


def real_view(tensor: torch.Tensor, op: int) -> torch.Tensor:
    """Return a complex tensor as twice as many real numbers, where that means the same."""
    return torch.view_as_real(tensor) if tensor.is_complex() and op in _LINEAR else tensor


def can_reduce(dtype: torch.dtype, op: int | None) -> bool:
    """Say whether the native core reduces this; complex numbers as what :func:`real_view` says."""
    if dtype.is_complex:
        return op in _LINEAR and can_reduce(dtype.to_real(), op)
    code = DTYPES.get(dtype)
    return code is not None and op is not None and bool(native.can_reduce(code, op))


def reduced_code(dtype: torch.dtype) -> int:
    """Return what the native core calls a dtype whose numbers it adds up.

    Raises:
        CollectiveInputError: If it cannot.
    """
    code = DTYPES.get(dtype)
    if code is None:
        raise CollectiveInputError(
            f"Tensors of {dtype} cannot be summed in shared memory. Sum them in torch.bfloat16 or "
            "torch.float32, or pass transport='c10d' if the process group can do it."
        )
    return code


def describe_request(request: Any) -> str:
    """Say in words what a rank brought: ``all_reduce #7 of 1024 float32 (sum)``.

    Args:
        request: A ``native.Request``.
    """
    name = KIND_NAMES.get(request.kind, f"collective {request.kind}")
    text = f"{name} #{request.seq}"
    if name in ("barrier", "all_to_all"):
        return text
    text += f" of {request.count} {_DTYPE_NAMES.get(request.dtype, 'unknown')}"
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        text += f" ({_OP_NAMES.get(request.op, 'unknown operation')})"
    if name in ("reduce", "gather"):
        text += f" to rank {request.root}"
    if name in ("broadcast", "scatter"):
        text += f" from rank {request.root}"
    return text


def is_behind(row: Any, other: Any) -> bool:
    """Say whether a rank has not come as far as another, by their ``native.Row``s."""
    return bool((row.phase - other.phase) & 0x8000_0000)  # phases count modulo 2^32


KIND_NAMES: dict[int, str] = {}
if native is not None:
    KIND_NAMES = {
        getattr(native, name): name.removeprefix("KIND_").lower()
        for name in dir(native)
        if name.startswith("KIND_")
    }
