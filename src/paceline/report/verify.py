"""Compares two trainings over shards, or two checkpoints: what differs first.

Called by ``paceline verify``. Knows files; torch is imported for checkpoints only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RecordsError
from paceline.observe.checksum_file import RoundChecksums, read_run
from paceline.printable import listed

MAX_NAMES = 5


@dataclass(frozen=True)
class VerifyResult:
    """What a comparison has found.

    Attributes:
        is_equal: All that both have is the same.
        text: The same in words.
        round: The first step that differs, if these are runs.
        shard: The first shard that differs there, if one does.
        names: Parameters and buffers that differ first.
    """

    is_equal: bool
    text: str
    round: int | None = None
    shard: int | None = None
    names: tuple[str, ...] = ()


def compare_runs(left: Path, right: Path) -> VerifyResult:
    """Compare two run folders, step by step.

    Raises:
        RecordsError: One of them has no checksums, or they have no step in common.
    """
    return compare_rounds(read_run(left), read_run(right), str(left), str(right))


def compare_rounds(
    left: Mapping[int, RoundChecksums],
    right: Mapping[int, RoundChecksums],
    left_name: str,
    right_name: str,
) -> VerifyResult:
    """The same for what was read."""
    common = sorted(set(left) & set(right))
    if not common:
        raise RecordsError(
            f"{left_name} and {right_name} have no step in common: one has steps "
            f"{_span(left)}, the other {_span(right)}"
        )
    for number in common:
        found = _compare_round(left[number], right[number])
        if found is not None:
            return found
    text = f"equal: {len(common)} steps, {_span(common)}"
    only = sorted(set(left) ^ set(right))
    if only:
        text += f"; {len(only)} steps are recorded in one of the two only"
    return VerifyResult(True, text)


def _compare_round(left: RoundChecksums, right: RoundChecksums) -> VerifyResult | None:
    names = tuple(_different(left.tensors, right.tensors))
    number = left.round
    if names:
        # What a round begins with is what the one before has made.
        before = f"step {number - 1}, or its update," if number else "the start"
        named = listed(names, MAX_NAMES)
        text = f"{named} differ at the start of step {number}: {before} made them so"
        return VerifyResult(False, text, number, None, names)
    for shard in sorted(set(left.shards) & set(right.shards)):
        mine, theirs = left.shards[shard], right.shards[shard]
        if mine != theirs:
            what = "its input" if mine[0] != theirs[0] else "its output, with the same input,"
            text = (
                f"step {number}, shard {shard}: {what} differs; parameters and buffers are equal "
                "up to there"
            )
            return VerifyResult(False, text, number, shard)
    return None


def compare_checkpoints(left: Path, right: Path) -> VerifyResult:
    """Compare two files that ``torch.save`` has written, tensor by tensor, bit for bit.

    Raises:
        RecordsError: One of them is no checkpoint that may be read safely.
    """
    mine, theirs = _load(left), _load(right)
    names = [name for name in {**mine, **theirs} if not _is_same(mine.get(name), theirs.get(name))]
    if not names:
        return VerifyResult(True, f"equal: {len(mine)} values")
    text = f"{listed(names, MAX_NAMES)} differ, of {len(mine)}"
    return VerifyResult(False, text, names=tuple(names))


def _load(path: Path) -> dict[str, Any]:
    import pickle

    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise RecordsError(
            f"{path} cannot be read as a checkpoint of torch.save: {error}"
        ) from error
    return dict(_flat(found, ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _flat(each, f"{name}[{index}]")
    else:
        yield name, value


def _is_same(left: Any, right: Any) -> bool:
    import torch

    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return type(left) is type(right) and bool(left == right or repr(left) == repr(right))
    if left.shape != right.shape or left.dtype != right.dtype or left.layout != right.layout:
        return False
    if left.is_sparse:
        left, right = left.coalesce(), right.coalesce()
        return _is_same(left.indices(), right.indices()) and _is_same(left.values(), right.values())
    pairs = (each.contiguous().reshape(-1).view(torch.uint8) for each in (left, right))
    return torch.equal(*pairs)


def _different(left: Mapping[str, str], right: Mapping[str, str]) -> Iterator[str]:
    """Names in one order: that of the model."""
    if left and right:
        for name in {**left, **right}:
            if left.get(name) != right.get(name):
                yield name


def _span(rounds: Any) -> str:
    numbers = sorted(rounds)
    return f"{numbers[0]} to {numbers[-1]}"
