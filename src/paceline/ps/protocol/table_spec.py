"""What a table is: frozen, the same for every trainer, and sent to servers as JSON.

``TableSpec`` is what all servers and trainers agree on. ``Shard`` is one server's part of it. Both
are checked on construction, wherever they come from: ``from_json`` trusts nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import ConfigurationError, TableShapeError
from paceline.ps.protocol.optimizers import OPTIMIZERS, SGD, Optimizer
from paceline.ps.protocol.wire import Dtype

NAME_LENGTH = 200
ROWS = 1 << 40
DIM = 1 << 16
SHARDS = 4096


class Sharding(enum.Enum):
    """Which server has which row."""

    HASH = "hash"
    """By a mix of the row's id: even load, whatever the ids mean."""
    RANGE = "range"
    """Consecutive ids together: server i of n has rows [rows*i//n, rows*(i+1)//n)."""
    TABLE = "table"
    """The whole table on one server; a server can then pool bags without changing a bit."""


class Start(enum.Enum):
    """What a row is before it was ever written."""

    NORMAL = "normal"
    """mean a, standard deviation b; 0 and 1 is what ``nn.Embedding`` has."""
    UNIFORM = "uniform"
    """from a to b."""
    CONSTANT = "constant"
    """a."""


@dataclass(frozen=True)
class Init:
    """First values of rows: a function of seed, table name and row id, and of nothing else.

    So it does not matter which server a row lives on, or when it is first asked for.
    """

    start: Start = Start.NORMAL
    a: float = 0.0
    b: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_number("a table's init", "a", self.a, above=-math.inf)
        _check_number("a table's init", "b", self.b, above=-math.inf)
        _check_range("a table's init", "seed", self.seed, -(1 << 63), (1 << 64) - 1)


@dataclass(frozen=True)
class TableSpec:
    """A table.

    Args:
        name: The same name is the same table, for all trainers.
        rows: ``num_embeddings``.
        dim: ``embedding_dim``.
        dtype: Of its rows.
        optimizer: What a push does.
        init: What rows begin with.
        padding_idx: A row that begins as zeros and never moves, or None.
        max_norm: Rows are scaled down to this norm when they are looked up, or None.
        norm_type: Which norm.
    """

    name: str
    rows: int
    dim: int
    dtype: Dtype = Dtype.FLOAT32
    optimizer: Optimizer = field(default_factory=SGD)
    init: Init = field(default_factory=Init)
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        _check_name(self.name)
        _check_range(f"table {self.name!r}", "rows", self.rows, 1, ROWS)
        _check_range(f"table {self.name!r}", "dim", self.dim, 1, DIM)
        if self.max_norm is not None:
            _check_number(f"table {self.name!r}", "max_norm", self.max_norm, above=0.0)
        _check_number(f"table {self.name!r}", "norm_type", self.norm_type, above=0.0)
        if self.padding_idx is not None and not _is_whole(self.padding_idx, 0, self.rows - 1):
            raise TableShapeError(
                f"table {self.name!r}: padding_idx must be within num_embeddings, {self.rows}, and "
                f"is {self.padding_idx!r:.40}"
            )

    def to_json(self) -> dict[str, Any]:
        """As JSON takes it."""
        found = dataclasses.asdict(self)
        found["dtype"] = self.dtype.name
        found["optimizer"] = {
            "kind": type(self.optimizer).__name__,
            **dataclasses.asdict(self.optimizer),
        }
        found["init"]["start"] = self.init.start.value
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> TableSpec:
        """The inverse of ``to_json``.

        Raises:
            ConfigurationError: It is none.
        """
        try:
            fields = dict(found)
            optimizer = dict(fields.pop("optimizer"))
            kind = OPTIMIZERS[optimizer.pop("kind")]
            if "betas" in optimizer:
                optimizer["betas"] = tuple(optimizer["betas"])
            init = dict(fields.pop("init"))
            start = Start(init.pop("start"))
            return cls(
                dtype=Dtype[fields.pop("dtype")],
                optimizer=kind(**optimizer),
                init=Init(start=start, **init),
                **fields,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigurationError(f"no description of a table: {error!r:.200}") from None


@dataclass(frozen=True)
class Shard:
    """One server's part of a table: number ``index`` of ``count`` servers."""

    sharding: Sharding
    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count <= SHARDS:
            raise ConfigurationError(f"shard {self.index} of {self.count} does not exist")

    def to_json(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {"sharding": self.sharding.value, "index": self.index, "count": self.count}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Shard:
        """The inverse of ``to_json``.

        Raises:
            ConfigurationError: It is none.
        """
        try:
            index, count = found["index"], found["count"]
            _check_range("a shard", "index", index, 0, SHARDS)
            _check_range("a shard", "count", count, 1, SHARDS)
            return cls(Sharding(found["sharding"]), index, count)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"no description of a shard: {error!r:.200}") from None


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LENGTH or not name.isprintable():
        raise ConfigurationError(
            f"a table's name has 1 to {NAME_LENGTH} printable characters, not {name!r:.80}"
        )


def _check_number(whose: str, what: str, value: Any, above: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not value > above:
        raise ConfigurationError(
            f"{whose}: {what} must be a finite number above {above:g}, not {value!r:.40}"
        )


def _is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _check_range(whose: str, what: str, value: Any, low: int, high: int) -> None:
    if not _is_whole(value, low, high):
        raise ConfigurationError(
            f"{whose}: {what} must be a whole number from {low} to {high}, not {value!r:.40}"
        )
