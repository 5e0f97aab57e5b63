"""A rank's checksums in a run folder: what ``paceline verify`` compares.

One JSON object in a line for each round (a step) of a training over shards. Written by
:mod:`paceline.ddp.features.shard_record`, read by :mod:`paceline.report.verify`. Must not import
torch. A process with several wrappers has a file for each: ``rank0.checksums`` of the first one,
``rank0.1.checksums`` of the second.

    {"round": 12, "of": 8, "tensors": {"layer.weight": "9f.."}, "shards": {"3": ["5a..", "77.."]},
     "gradients": {"3": {"layer.weight": "21.."}}}

``of`` is the number of shards of all ranks. ``tensors`` are the parameters and buffers that the
round begins with; one rank writes them. ``shards`` are those of this rank: a checksum of its
micro-batch, and one of what the module made of it. ``gradients`` are those of each shard by itself;
few rounds have them. A round that is done again, after a rank has died, has a second line, which
counts. The last line of the rank that writes tensors has no shards: it is the state at the end,
under the number of the round that would have come next.

[Note: bounded]
A file has :data:`MAX_BYTES` at most. When it is full, every second of its rounds is dropped, and
from then on half as many are recorded: rounds whose number is a multiple of a power of two. So the
whole run stays covered.
"""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import MAX_SHARDS
from paceline.errors import RecordsError
from paceline.observe.private_file import open_private
from paceline.observe.untrusted import MAKES_NO_SENSE, read_bounded

MAX_BYTES = 32 << 20
_NAME = re.compile(r"rank(\d+)(?:\.(\d+))?\.checksums")

logger = logging.getLogger("paceline")


@dataclass(frozen=True)
class RoundChecksums:
    """What is known of one round.

    Attributes:
        round: Its number.
        tensors: Checksums of parameters and buffers at its begin, by name.
        shards: For each shard, checksums of its micro-batch and of its output.
        count: How many shards there are; 0: that is not known.
        gradients: For each shard, checksums of its own gradients by parameter.
    """

    round: int
    tensors: dict[str, str] = field(default_factory=dict)
    shards: dict[int, tuple[str, str]] = field(default_factory=dict)
    count: int = 0
    gradients: dict[int, dict[str, str]] = field(default_factory=dict)

    @property
    def is_end(self) -> bool:
        """Whether no round has begun here: this is the state at the end of the run."""
        return not self.shards


class ChecksumWriter:
    """Appends rounds to a file. A full disk costs the record, not the training.

    Args:
        folder: Of the run.
        rank: Whose file.
        wrapper: Of this process, counted from 0.
        limit: Bytes.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        *,
        wrapper: int = 0,
        limit: int = MAX_BYTES,
    ) -> None:
        name = f"rank{rank}.{wrapper}" if wrapper else f"rank{rank}"
        self.path: Path | None = Path(folder) / f"{name}.checksums"
        self._limit = limit
        self._interval = 1

    def wants(self, number: int) -> bool:
        """Whether a round is to be recorded."""
        return self.path is not None and number % self._interval == 0

    def write(self, found: RoundChecksums) -> None:
        """Append a round."""
        if self.path is None:
            return
        line = json.dumps(
            {
                "round": found.round,
                "of": found.count,
                "tensors": found.tensors,
                "shards": {str(shard): list(pair) for shard, pair in found.shards.items()},
            }
            | ({"gradients": found.gradients} if found.gradients else {})
        )
        try:
            descriptor = open_private(self.path, os.O_APPEND)
            with os.fdopen(descriptor, "a") as file:
                file.write(line + "\n")
                size = file.tell()
            if size > self._limit and not found.is_end:
                self._thin_out(self.path)
        except OSError as error:
            logger.warning("checksums are not recorded any more: %s", error)
            self.path = None

    def _thin_out(self, path: Path) -> None:
        """Drop every second round: see [Note: bounded]."""
        self._interval *= 2
        kept = [each for each in read_file(path).values() if each.round % self._interval == 0]
        draft = path.with_suffix(".checksums-new")
        draft.unlink(missing_ok=True)
        writer = ChecksumWriter(path.parent, 0, limit=1 << 62)
        writer.path = draft
        for each in kept:
            writer.write(each)
        draft.replace(path)


def read_file(path: Path) -> dict[int, RoundChecksums]:
    """Read a rank's rounds; a last line that was cut off is left out.

    Raises:
        RecordsError: It is no such file.
    """
    found: dict[int, RoundChecksums] = {}
    try:
        lines = read_bounded(path, 2 * MAX_BYTES).split(b"\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecordsError(f"the checksums in {path} cannot be read: {reason}") from error
    for number, line in enumerate(lines[:-1]):
        try:
            data = json.loads(line)
            shards = {int(k): (str(a), str(b)) for k, (a, b) in data["shards"].items()}
            tensors = {str(k): str(v) for k, v in data["tensors"].items()}
            gradients = {
                int(shard): {str(k): str(v) for k, v in named.items()}
                for shard, named in data.get("gradients", {}).items()
            }
            count = _count(data.get("of", 0))
            each = RoundChecksums(int(data["round"]), tensors, shards, count, gradients)
        except (*MAKES_NO_SENSE, AttributeError) as error:
            raise RecordsError(f"{path}, line {number + 1} is no record of checksums") from error
        found[each.round] = each
    return found


def _count(value: Any) -> int:
    if not 0 <= int(value) <= MAX_SHARDS:
        raise ValueError("no number of shards")
    return int(value)


def read_run(folder: Path) -> list[dict[int, RoundChecksums]]:
    """Read what all ranks of a run have recorded, as one: the rounds of each wrapper.

    Raises:
        RecordsError: There are no checksums in the folder, or a file of them is damaged.
    """
    wrappers: dict[int, dict[int, RoundChecksums]] = {}
    matches = [(path, _NAME.fullmatch(path.name)) for path in folder.iterdir()]
    paths = [(path, int(match[2] or 0)) for path, match in matches if match]
    for path, wrapper in sorted(paths, key=lambda each: each[0].stat().st_mtime):
        rounds = wrappers.setdefault(wrapper, {})
        for number, each in read_file(path).items():
            into = rounds.setdefault(number, RoundChecksums(number, count=each.count))
            into.tensors.update(each.tensors)
            into.shards.update(each.shards)
            into.gradients.update(each.gradients)
    if not any(wrappers.values()):
        raise RecordsError(
            f"{folder} has no checksums: a training over shards (docs/same-bits.md) writes them "
            "while it runs under `paceline run`, or with PACELINE_RUN_DIR set"
        )
    return [dict(sorted(rounds.items())) for _, rounds in sorted(wrappers.items())]
