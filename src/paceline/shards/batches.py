"""Cuts a rank's batch into the micro-batches of its shards.

Called by the loop over shards. Everything in a batch is cut, along dimension 0: tensors and numpy
arrays, in containers and in types that are registered with torch's pytrees, and lists with one
entry for each sample, such as texts. What cannot be cut would reach every shard as a whole, a
different whole at another number of ranks: it is refused by name, None aside.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from paceline.containers import contents, field_names, is_dataclass, is_namedtuple, rebuild
from paceline.errors import ConfigurationError
from paceline.torch_private.modules import rebuild_registered, registered_contents


class MicroBatches(list[Any]):
    """The micro-batches of one rank's shards, in order: what a ``ShardLoader`` yields."""


def cut_batch(batch: Any, shards: range, count: int, rank: int) -> Sequence[Any]:
    """Return one micro-batch for each of this rank's shards.

    Raises:
        ConfigurationError: If it cannot be cut into as many equal ones.
    """
    if isinstance(batch, MicroBatches):
        if len(batch) != len(shards):
            raise ConfigurationError(
                f"Rank {rank}: a loader has brought {len(batch)} micro-batches for the "
                f"{len(shards)} shards of this rank. Was it made before the number of ranks "
                "changed? Begin a new iterator."
            )
        return batch
    found = dict(_sizes(batch, "batch"))
    whole = [place for place, size in found.items() if size is None]
    if whole:
        raise ConfigurationError(
            f"Rank {rank}: {', '.join(whole[:5])} cannot be cut into the micro-batches of "
            f"{len(shards)} shards. A batch has tensors, numpy arrays and lists with one entry for "
            "each sample, also in tuples, lists, dicts, dataclasses and types that are registered "
            "with torch.utils._pytree. Leave the rest out of ddp.shards(...)."
        )
    sizes = {size or 0 for size in found.values()} or {0}
    if len(sizes) != 1 or 0 in sizes or next(iter(sizes)) % len(shards):
        told = ", ".join(f"{place}: {size}" for place, size in list(found.items())[:5])
        raise ConfigurationError(
            f"Rank {rank} runs shards {shards.start} to {shards.stop - 1} of {count}, so each "
            f"tensor of its batch must have a first dimension that is the same multiple of "
            f"{len(shards)}, not {sorted(sizes)} ({told or 'it is empty'}). Give each rank the "
            "samples of its own shards: paceline.ShardLoader does."
        )
    size = next(iter(sizes)) // len(shards)
    return [_rows(batch, slice(n * size, (n + 1) * size)) for n in range(len(shards))]


def _rows(value: Any, rows: slice) -> Any:
    """Return some rows of everything, in memory of their own: kernels look at alignment."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return value.narrow(0, rows.start, rows.stop - rows.start).clone()
    if _is_array(value):
        return value[rows].copy()
    if _has_samples(value):
        return value[rows]
    build, parts, _ = _open(value)
    return build([_rows(part, rows) for part in parts])


def _sizes(value: Any, place: str) -> Iterator[tuple[str, int | None]]:
    """Yield how many samples each leaf has; None for one that cannot be cut."""
    if value is None:
        return
    if isinstance(value, torch.Tensor) or _is_array(value):
        yield (place, int(value.shape[0])) if value.ndim else (f"{place} (a scalar)", None)
    elif _has_samples(value):
        yield place, len(value)
    else:
        _, parts, names = _open(value)
        if not parts and contents(value) is None:
            yield f"{place} ({type(value).__name__})", None
        for name, part in zip(names, parts, strict=True):
            yield from _sizes(part, f"{place}{name}")


def _open(value: Any) -> tuple[Callable[[list[Any]], Any], list[Any], list[str]]:
    """Return how to build the same with other contents, what it holds, and names for that."""
    parts = contents(value)
    if parts is None:
        parts = registered_contents(value)
        names = [f"[{index}]" for index in range(len(parts))]
        return lambda made: rebuild_registered(value, made), parts, names
    if isinstance(value, dict):
        names = [f"[{key!r}]" for key in value]
    elif is_dataclass(value):
        names = [f".{name}" for name in field_names(value)]
    elif is_namedtuple(value):
        names = [f".{name}" for name in value._fields]
    else:
        names = [f"[{index}]" for index in range(len(parts))]
    return lambda made: rebuild(value, made), parts, names


def _has_samples(value: Any) -> bool:
    """Whether this is a list with an entry for each sample, and not of lists or of tensors."""
    if not isinstance(value, (list, tuple)) or is_namedtuple(value) or not value:
        return False
    return not any(isinstance(each, (list, tuple)) or _has_rows(each) for each in value)


def _has_rows(value: Any) -> bool:
    """Whether there is a tensor in it, or an array."""
    is_one = isinstance(value, torch.Tensor) or _is_array(value)
    return is_one or any(map(_has_rows, _open(value)[1]))


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)
