"""``ps.EmbeddingBagCollection``: several tables, one round trip to each server for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from paceline.errors import BagsError
from paceline.ps.client.batch import Bags, FlatBags, flat_bags, is_same, reading_of
from paceline.ps.client.row_io import read_rows, write_rows
from paceline.ps.client.table_config import TableConfig
from paceline.ps.client.table_set import Batch
from paceline.ps.modules.base import AnyServers, ServedModule
from paceline.ps.protocol.optimizers import Optimizer

CollectionBatch = Mapping[str, Tensor | Bags]
"""For each table its ids (2-D), or ``Bags``."""


class EmbeddingBagCollection(ServedModule):
    """Several ``EmbeddingBag`` whose lookups and pushes travel together.

    >>> import torch
    >>> from paceline import ps
    >>> tables = [ps.TableConfig("user", 1000, 8), ps.TableConfig("item", 5000, 8)]
    >>> with ps.local(2) as servers, ps.connect(servers) as connection:
    ...     bags = ps.EmbeddingBagCollection(tables, servers=connection, optimizer=ps.Adagrad(0.1))
    ...     found = bags({"user": torch.tensor([[1], [2]]), "item": torch.tensor([[7, 8], [9, 7]])})
    ...     found["item"].shape
    torch.Size([2, 8])

    Args:
        tables: What they are; each has a name.
        servers: What ``ps.connect`` or ``ps.local`` returned, or addresses.
        optimizer: For all tables, instead of those in ``tables``.
        staleness: How many own pushes the rows of a prefetched batch may lack.
        grad_scale: Gradients are multiplied by this before they are pushed. With n trainers, 1/n
            makes them DDP's mean.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        servers: AnyServers,
        optimizer: Optimizer | None = None,
        staleness: int = 0,
        grad_scale: float = 1.0,
    ) -> None:
        if optimizer is not None:
            tables = [dataclasses.replace(table, optimizer=optimizer) for table in tables]
        super().__init__(tables, servers, staleness, grad_scale)
        self._configs = {config.name: (at, config) for at, config in enumerate(tables)}
        kinds = [reading_of(config) for config in tables]
        self._readings = [kinds.index(kind) for kind in kinds]  # numbers are compared faster

    @property
    def lr(self) -> dict[str, float]:
        """The learning rates that go with the next push. Settable: one for all, or by name."""
        return dict(zip(self._configs, self._tables.lrs, strict=True))

    @lr.setter
    def lr(self, value: float | Mapping[str, float]) -> None:
        given = value if isinstance(value, Mapping) else dict.fromkeys(self._configs, value)
        for name, lr in given.items():
            self._tables.lrs[self._index(name)] = float(lr)

    def forward(self, batch: CollectionBatch) -> dict[str, Tensor]:
        """The pooled bags of each table in the batch, by name; it need not have all tables."""
        found = self._tables.forward(batch, lambda: self._read(batch))
        return {name: found[self._configs[name][0]] for name in batch}

    def joined(self, batch: CollectionBatch) -> Tensor:
        """The pooled bags of all tables in the batch side by side, in its order: one matrix.

        The same as ``torch.cat([*self(batch).values()], 1)``, for less work.

        >>> import torch
        >>> from paceline import ps
        >>> tables = [ps.TableConfig("user", 1000, 8), ps.TableConfig("item", 5000, 4)]
        >>> with ps.local(1) as servers:
        ...     bags = ps.EmbeddingBagCollection(tables, servers=servers, optimizer=ps.SGD(0.1))
        ...     found = bags.joined({"user": torch.tensor([[1]]), "item": torch.tensor([[7]])})
        ...     found.shape
        torch.Size([1, 12])

        Raises:
            BagsError: Tables have different numbers of bags.
        """
        order = [(self._configs.get(name) or self._unknown(name))[0] for name in batch]
        return self._tables.joined(batch, order, lambda: self._read(batch))

    def prefetch(self, batch: CollectionBatch) -> None:
        """Announce the input of a later forward, so that its lookup overlaps with other work."""
        self._tables.prefetch(batch, self._read(batch))

    def rows(self, table: str, ids: Tensor) -> Tensor:
        """The rows of some ids, without a graph."""
        return read_rows(self._tables, self._index(table), ids)

    def write(self, table: str, ids: Tensor, rows: Tensor) -> None:
        """Overwrite rows; their optimizer state begins anew."""
        write_rows(self._tables, self._index(table), ids, rows)

    def extra_repr(self) -> str:
        """As torch shows its modules."""
        lines = (
            f"{name}: {config.num_embeddings} x {config.embedding_dim}, {config.mode}"
            for name, (_, config) in self._configs.items()
        )
        return "\n".join(lines)

    def _read(self, batch: CollectionBatch) -> Batch:
        """Check a batch. Tables that get the same bags one after the other share what is found."""
        if not batch:
            raise BagsError("a batch without any table")
        found: dict[int, FlatBags] = {}
        last: Any = None
        reading = -1
        for name, bags in batch.items():
            at, config = self._configs.get(name) or self._unknown(name)
            is_last = reading == self._readings[at] and (bags is last or is_same(bags, last))
            if not is_last:
                flat = flat_bags(config, bags)
                last, reading = bags, self._readings[at]
            found[at] = flat
        return found

    def _unknown(self, name: str) -> NoReturn:
        self._index(name)
        raise AssertionError(name)
