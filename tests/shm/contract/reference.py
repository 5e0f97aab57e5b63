"""What every collective must give, computed by one process with plain torch.

Every rank can make every rank's input, so that each checks its own results by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

INTEGERS = ("uint8", "int8", "int32", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = (*INTEGERS, *FLOATS, *COMPLEX, "bool")
"""What gloo reduces."""

_BITWISE = ("BAND", "BOR", "BXOR")
_HALF = (torch.float16, torch.bfloat16)
_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
# Also for torch, 'sum' of truth values is 'any' and their product is 'all'.


def ops_of(dtype: str) -> tuple[str, ...]:
    """Return the reduce operations that gloo has for a dtype."""
    if dtype in COMPLEX:
        return ("SUM", "AVG")
    if dtype in FLOATS:
        return ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
    return ("SUM", "PRODUCT", "MIN", "MAX", *_BITWISE)


def make(size: int, dtype: str, *seeds: int) -> torch.Tensor:
    """Make a flat tensor of random values; the same for the same seeds.

    Integers take their whole range, so that sums overflow. Floats are such that products do not.
    """
    kind: torch.dtype = getattr(torch, dtype)
    seed = functools.reduce(lambda total, part: total * 1009 + part + 1, seeds, 7)
    source = torch.Generator().manual_seed(seed)
    if kind == torch.bool:
        return torch.randint(0, 2, (size,), generator=source).bool()
    if kind.is_complex:
        return torch.randn(size, dtype=kind, generator=source)
    if kind.is_floating_point:
        return (torch.rand(size, dtype=torch.float64, generator=source) * 4 - 2).to(kind)
    whole = torch.randint(-(2**63), 2**63 - 1, (size,), generator=source)
    return whole.to(kind)


def reduce(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce in the order of ranks; half precision in float32, rounded once."""
    dtype = parts[0].dtype
    wide = [part.float() if dtype in _HALF else part for part in parts]
    total = functools.reduce(_REDUCE[op], wide)
    if op == "AVG":
        real = torch.view_as_real(total) if total.is_complex() else total
        real = real / len(parts)
        total = torch.view_as_complex(real) if total.is_complex() else real
    return total.to(dtype)


def bound(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Say how far any order of the same operation, rounded each time, may be off."""
    sizes = [part.abs().double() for part in parts]
    scale = functools.reduce(_REDUCE[op], sizes)
    info = torch.finfo(parts[0].dtype)
    # The second term: products of small numbers end where the dtype does.
    return 2 * len(parts) * (info.eps * scale + info.smallest_normal * info.eps)


def is_reordering_exact(dtype: torch.dtype, op: str, world: int) -> bool:
    """Say whether a reduction has the same bits in whatever order it is done."""
    is_number = dtype.is_floating_point or dtype.is_complex
    return not is_number or op in ("MIN", "MAX") or world == 1 or (world == 2 and op != "AVG")
