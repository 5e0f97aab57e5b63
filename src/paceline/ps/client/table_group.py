"""Tables that can be looked up as one matrix, and pooled by one call.

Made by ``ps/client/table_set.py``, used by what plans a batch.

Tables are of one *group* if rows of all of them fit into one matrix and torch can pool all bags at
once. What is the same for every batch (numbers of tables on servers, records of sections) is made
once, here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.ps.client.row_plan import Layout
from paceline.ps.client.table_config import DTYPES, TableConfig
from paceline.ps.protocol.optimizers import Adam
from paceline.ps.protocol.table_spec import Sharding
from paceline.ps.protocol.wire import ALIGNMENT, RECORD, Form

Records = NDArray[np.void]


@dataclass(frozen=True)
class AttachedTable:
    """One attached table.

    Args:
        config: What it is.
        numbers: Its number on each server, or -1 where it is not.
    """

    config: TableConfig
    numbers: tuple[int, ...]

    @cached_property
    def padding(self) -> int | None:
        """The padding row, counted from the front."""
        return self.config.spec().padding_idx

    @cached_property
    def first_server(self) -> int:
        """The first server that has a part of it; the only one with ``Sharding.TABLE``."""
        return next(at for at, number in enumerate(self.numbers) if number >= 0)


@dataclass(frozen=True)
class GroupKey:
    """What tables of one group have in common; ``alone`` keeps a table to itself."""

    dim: int
    dtype: torch.dtype
    mode: str
    scale_grad_by_freq: bool
    sparse: bool
    sharding: Sharding
    is_weighted: bool
    alone: int

    @cached_property
    def is_scaled(self) -> bool:
        """Whether a bag's gradient is multiplied by something before it is added to a row's."""
        return self.mode == "mean" or self.is_weighted or self.scale_grad_by_freq


def group_key_of(index: int, config: TableConfig, is_weighted: bool, is_bags: bool) -> GroupKey:
    """Which group a table belongs to for this batch.

    A table with padding stays alone because torch takes one ``padding_idx``; one whose rows are no
    multiple of the wire's alignment because its sections are padded.
    """
    is_aligned = config.embedding_dim * config.dtype.itemsize % ALIGNMENT == 0
    is_free = is_bags and is_aligned and config.padding_idx is None
    return GroupKey(
        config.embedding_dim,
        config.dtype,
        config.mode,
        config.scale_grad_by_freq,
        config.sparse,
        Sharding(config.sharding),
        is_weighted,
        -1 if is_free else index,
    )


class Group:
    """Tables with the same key.

    Args:
        tables: Their indices in the module.
        attached: What they are and where.
        key: What they have in common.

    Attributes:
        records: For each server the records of all tables, with no ids yet.
        counts_pushes: For each server, which tables must be in every push: the steps of Adam.
        least_sections: For each server: a push with fewer sections may lack such a table.
    """

    def __init__(
        self, tables: Sequence[int], attached: Sequence[AttachedTable], key: GroupKey
    ) -> None:
        self.tables = tuple(tables)
        self.attached = tuple(attached)
        self.key = key
        self.row_bytes = key.dim * key.dtype.itemsize
        servers = len(attached[0].numbers)
        configs = [table.config for table in attached]
        self.layout = Layout(
            [config.name for config in configs],
            [config.num_embeddings for config in configs],
            key.sharding,
            servers,
            [table.first_server for table in attached],
        )
        self._lrs: list[float] | None = None
        self._records_lrs = b""
        self.records = [self._records(server) for server in range(servers)]
        is_adam = np.array([isinstance(config.optimizer, Adam) for config in configs])
        numbers = np.array([table.numbers for table in attached])
        self.counts_pushes = [is_adam & (numbers[:, server] >= 0) for server in range(servers)]
        here = (numbers >= 0).sum(axis=0)
        self.least_sections = [
            int(here[server]) if each.any() else 0 for server, each in enumerate(self.counts_pushes)
        ]

    def templates(self, lrs: Sequence[float]) -> bytes:
        """The records of all servers and tables, with the learning rates of a module.

        As long as they stay, it is the same object.
        """
        if lrs != self._lrs:
            whole = np.concatenate(self.records)
            whole["lr"] = np.tile([lrs[table] for table in self.tables], len(self.records))
            self._records_lrs = whole.tobytes()
            self._lrs = list(lrs)
        return self._records_lrs

    def _records(self, server: int) -> Records:
        records = np.zeros(len(self.attached), RECORD)
        records["table"] = [max(0, table.numbers[server]) for table in self.attached]
        records["form"] = Form.ROWS
        records["dtype"] = DTYPES[self.key.dtype]
        return records
