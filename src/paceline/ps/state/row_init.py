"""First values of rows: a pure function of seed, table name and row id.

Called by ``ps/state/table.py`` for rows that were never written. Counter-based: each pair of values
is a mix of the row's id and the pair's number, so it does not matter which server has a row, when
it is first asked for, or whether it was asked for before. Nothing here has state.

[Note: the same bits everywhere]
Only integer arithmetic, table look-ups, additions and products are used, which are exact by IEEE
754 on each machine. Logarithms and cosines (Box and Muller) differ in the last bit from one CPU to
the next. A normal value is a quantile, interpolated between 65,537 tabulated ones; the first and
last are those of 2**-17 and 1 - 2**-17, so values end at 4.3 standard deviations.
"""

from __future__ import annotations

import functools
import hashlib
import statistics
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.ps.protocol.table_spec import Init, Start
from paceline.ps.protocol.wire import Dtype

TORCH_DTYPES: dict[Dtype, torch.dtype] = {d: getattr(torch, d.name.lower()) for d in Dtype}

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_CELLS = 1 << 15
# So many values are made at a time: temporaries stay in the second-level cache.
_BLOCK = 1 << 14


def first_rows(init: Init, name: str, dim: int, dtype: Dtype, ids: NDArray[np.int64]) -> Tensor:
    """The first values of these rows: a new tensor, ``len(ids) x dim``."""
    wanted = TORCH_DTYPES[dtype]
    if init.start is Start.CONSTANT:
        return torch.full((len(ids), dim), init.a, dtype=wanted)
    # Half precision is rounded once, from float32.
    work: Any = np.float64 if dtype is Dtype.FLOAT64 else np.float32
    found = np.empty((len(ids), dim), work)
    key = _key(init.seed, name)
    step = max(1, _BLOCK // dim)
    for start in range(0, len(ids), step):
        bits = _bits(key, ids[start : start + step], dim)
        found[start : start + step] = _values(init, bits, work)
    return torch.from_numpy(found).to(wanted)


def _key(seed: int, name: str) -> np.uint64:
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    key: np.uint64 = np.uint64(int.from_bytes(digest, "little"))
    return key


def _bits(key: np.uint64, ids: NDArray[np.int64], dim: int) -> NDArray[np.uint32]:
    """32 random bits for each value: ``len(ids) x dim``."""
    pairs = (dim + 1) // 2
    rows = _mixed(ids.astype(np.uint64) * _GOLDEN + key)
    counters = np.arange(1, pairs + 1, dtype=np.uint64) * _GOLDEN
    found: NDArray[np.uint32] = _mixed(rows[:, None] + counters).view(np.uint32)[:, :dim]
    return found


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: each bit of the result depends on each bit of ``x``."""
    x ^= x >> np.uint64(30)
    x *= _MIX_1
    x ^= x >> np.uint64(27)
    x *= _MIX_2
    x ^= x >> np.uint64(31)
    return x


def _values(init: Init, bits: NDArray[np.uint32], work: Any) -> NDArray[Any]:
    if init.start is Start.UNIFORM:
        # 24 bits are exact in float32, and the top is never reached.
        unit = (bits >> np.uint32(8)).astype(work) * work(2.0**-24)
        uniform: NDArray[Any] = unit * work(init.b - init.a) + work(init.a)
        return uniform
    # The upper 16 bits choose a cell, the lower ones a place in it.
    halves = np.ascontiguousarray(bits).view(np.uint16).reshape(*bits.shape, 2)
    quantiles, steps = _normal_cells(work)
    cells = halves[..., 1].astype(np.intp)
    normal: NDArray[Any] = steps[cells]
    normal *= halves[..., 0]
    normal += quantiles[cells]
    if (init.a, init.b) != (0.0, 1.0):
        normal *= work(init.b)
        normal += work(init.a)
    return normal


@functools.cache
def _normal_cells(work: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """For each cell the quantile where it begins, and a 65,536th of what it adds."""
    inverse = statistics.NormalDist().inv_cdf
    half = [inverse(0.5 + 0.5 * cell / _CELLS) for cell in range(1, _CELLS)]
    last = inverse(1.0 - 2.0**-17)
    # Rounded to float32 first: the logarithm behind a quantile may differ in its last bit.
    upper = np.array([*half, last], np.float32).astype(work)
    borders = np.concatenate((-upper[::-1], np.zeros(1, work), upper))
    return borders[:-1], np.diff(borders) * work(2.0**-16)
