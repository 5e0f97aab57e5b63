"""Compares two trainings over shards, or two checkpoints: what differs first.

Called by ``paceline verify``. Knows files; torch is imported for checkpoints only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
        text: The same in words, with what one of them does not have.
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
    names = str(left), str(right)
    mine, theirs = read_run(left), read_run(right)
    if len(mine) != len(theirs):
        text = f"{names[0]} has {len(mine)} wrappers with shards, {names[1]} has {len(theirs)}"
        return VerifyResult(False, text)
    verdicts = [_compare_rounds(*pair, names) for pair in zip(mine, theirs, strict=True)]
    if len(verdicts) == 1:
        return verdicts[0]
    named = [replace(v, text=f"wrapper {n}: {v.text}") for n, v in enumerate(verdicts, 1)]
    different = [each for each in named if not each.is_equal]
    if different:
        return min(different, key=lambda each: each.round or 0)
    return VerifyResult(True, "\n".join(each.text for each in named))


Rounds = Mapping[int, RoundChecksums]


def _compare_rounds(left: Rounds, right: Rounds, names: tuple[str, str]) -> VerifyResult:
    common = sorted(set(left) & set(right))
    if not common:
        raise RecordsError(
            f"{names[0]} and {names[1]} have no step in common: one has steps {_span(left)}, the "
            f"other {_span(right)}"
        )
    for number in common:
        before = left.get(number - 1), right.get(number - 1)
        found = _compare_round(left[number], right[number], names, before)
        if found is not None:
            return found
    steps = [number for number in common if not (left[number].is_end or right[number].is_end)]
    text = f"equal: {len(steps)} steps, {_span(steps)}" if steps else "equal: no step"
    if common[-1:] != steps[-1:]:
        text += ", and what the last one has made"
    both = {**left, **right}
    only = [number for number in set(left) ^ set(right) if not both[number].is_end]
    if only:
        text += f"; {len(only)} steps are recorded in one of the two only"
    for name, rounds in zip(names, (left, right), strict=True):
        text += _incomplete(name, [rounds[number] for number in steps])
    return VerifyResult(True, text)


def _incomplete(name: str, rounds: Sequence[RoundChecksums]) -> str:
    """Say what a run has not recorded: a file is missing, or a rank died before it wrote."""
    bare = sum(not each.tensors for each in rounds)
    text = f"; {name} has no parameters of {bare} of them" if bare else ""
    lacking = [set(range(each.count)) - set(each.shards) for each in rounds]
    steps = sum(map(bool, lacking))
    if steps:
        shards = ", ".join(map(str, sorted(set().union(*lacking))))
        text += f"; {name} has no checksums of shards {shards} in {steps} of them"
    return text


Before = tuple[RoundChecksums | None, RoundChecksums | None]
"""What both runs have recorded of the step before."""


def _compare_round(
    left: RoundChecksums, right: RoundChecksums, runs: tuple[str, str], before: Before
) -> VerifyResult | None:
    if left.count and right.count and left.count != right.count:
        text = (
            f"step {left.round}: {runs[0]} has {left.count} shards, {runs[1]} has {right.count}; "
            "only trainings with as many shards have the same bits"
        )
        return VerifyResult(False, text, left.round)
    names = tuple(_different(left.tensors, right.tensors))
    number = left.round
    if names:
        where = "at the end" if left.is_end and right.is_end else f"at the start of step {number}"
        text = f"{listed(names, MAX_NAMES)} differ {where}: {_cause(number, before)}"
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
        names = tuple(_different(left.gradients.get(shard, {}), right.gradients.get(shard, {})))
        if names:
            text = (
                f"step {number}, shard {shard}: its gradients of {listed(names, MAX_NAMES)} "
                "differ; its input and output are equal"
            )
            return VerifyResult(False, text, number, shard, names)
    return None


def _cause(number: int, before: Before) -> str:
    """What a round begins with is what the one before has made: say what of it."""
    if not number:
        return "the start made them so"
    if all(each is not None and _has_gradients(each) for each in before):
        return (
            f"the gradients of each shard of step {number - 1} are equal, so what came after them "
            "made them so: clipping, the optimizer, its learning rate, or the sum over shards"
        )
    return (
        f"step {number - 1}, or its update, made them so. To learn the shard, train both again "
        "with paceline.Shards(..., checksum_gradients_every=1)"
    )


def _has_gradients(found: RoundChecksums) -> bool:
    return bool(found.count) and len(found.gradients) == found.count


def compare_checkpoints(left: Path, right: Path) -> VerifyResult:
    """Compare two files that ``torch.save`` has written, tensor by tensor, bit for bit.

    Raises:
        RecordsError: One of them is no checkpoint that may be read safely.
    """
    mine, theirs = _load(left), _load(right)
    names = [
        name
        for name in {**mine, **theirs}
        if name not in mine or name not in theirs or not _is_same(mine[name], theirs[name])
    ]
    if not names:
        return VerifyResult(True, f"equal: {len(mine)} values")
    text = f"{listed(names, MAX_NAMES)} differ, of {len(mine)}"
    return VerifyResult(False, text, names=tuple(names))


def _load(path: Path) -> dict[str, Any]:
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise RecordsError(
            f"{path} cannot be read as a checkpoint of torch.save: {error}"
        ) from error
    return dict(_flat(found, ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list, tuple)) and not value:
        yield name, value
    elif isinstance(value, dict):
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
        if type(left) is not type(right):
            return False
        is_same_number = left == right and not isinstance(left, float)  # -0.0 is not 0.0
        return bool(is_same_number or repr(left) == repr(right))
    if left.shape != right.shape or left.dtype != right.dtype or left.layout != right.layout:
        return False
    if left.is_sparse:
        left, right = left.coalesce(), right.coalesce()
        return _is_same(left.indices(), right.indices()) and _is_same(left.values(), right.values())
    if left.layout is not torch.strided:  # compressed rows or columns
        left, right = left.to_dense(), right.to_dense()
    if left.is_quantized:
        if not torch.equal(left.dequantize(), right.dequantize()):
            return False
        left, right = left.int_repr(), right.int_repr()
    plain = (each.resolve_conj().resolve_neg().contiguous() for each in (left, right))
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in plain))


def _different(left: Mapping[str, str], right: Mapping[str, str]) -> Iterator[str]:
    """Names in one order: that of the model."""
    if left and right:
        for name in {**left, **right}:
            if left.get(name) != right.get(name):
                yield name


def _span(rounds: Any) -> str:
    numbers = sorted(rounds)
    return f"{numbers[0]} to {numbers[-1]}"
