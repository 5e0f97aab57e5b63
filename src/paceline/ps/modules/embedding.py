"""``ps.Embedding`` and ``ps.EmbeddingBag``: torch's modules, with the table on servers."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.ps.client.batch import Bags, flat_bags, flat_ids
from paceline.ps.client.row_io import read_rows, write_rows
from paceline.ps.client.table_config import TableConfig
from paceline.ps.modules.base import AnyServers, ServedModule, checked_rows
from paceline.ps.protocol.optimizers import SGD, Optimizer
from paceline.ps.protocol.table_spec import Init

_Module = TypeVar("_Module", bound="_OneTable")


class _OneTable(ServedModule):
    """A module with one table."""

    def __init__(
        self, config: TableConfig, servers: AnyServers, staleness: int, grad_scale: float
    ) -> None:
        super().__init__([config], servers, staleness, grad_scale)
        self.config = config
        self.num_embeddings = config.num_embeddings
        self.embedding_dim = config.embedding_dim
        self.padding_idx = config.spec().padding_idx

    @classmethod
    def from_pretrained(
        cls: type[_Module], embeddings: Tensor, freeze: bool = True, **options: Any
    ) -> _Module:
        """A table that holds these rows; they are written to the servers.

        Every trainer that calls this writes them: do so before training begins.

        Args:
            embeddings: The rows.
            freeze: Nothing is pushed until ``module.freeze = False``.
            options: As the constructor's.
        """
        rows = checked_rows(embeddings)
        make: Any = cls
        module: _Module = make(len(rows), rows.shape[1], dtype=rows.dtype, **options)
        module.write(torch.arange(len(rows)), rows)
        module.freeze = freeze
        return module

    @property
    def lr(self) -> float:
        """The learning rate that goes with the next push. Settable."""
        return self._tables.lrs[0]

    @lr.setter
    def lr(self, value: float) -> None:
        self._tables.lrs[0] = float(value)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of some ids, without a graph."""
        return read_rows(self._tables, 0, ids)

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Overwrite rows; their optimizer state begins anew."""
        write_rows(self._tables, 0, ids, rows)

    def extra_repr(self) -> str:
        """As torch shows its modules."""
        config = self.config
        return (
            f"{config.num_embeddings}, {config.embedding_dim}, name={config.name!r}, "
            f"optimizer={config.optimizer}, sharding={config.sharding!r}, "
            f"servers={len(self.servers)}"
        )


class Embedding(_OneTable):
    """``nn.Embedding`` with its table on servers; forward looks up, backward pushes.

    >>> from paceline import ps
    >>> with ps.local(2) as servers:
    ...     words = ps.Embedding(1_000_000, 64, servers=servers, name="words")
    ...     words(torch.tensor([[1, 2], [3, 1]])).sum().backward()
    ...     words.close()

    Args:
        num_embeddings: Rows; the first six arguments are those of ``nn.Embedding``.
        embedding_dim: Values in a row.
        padding_idx: A row that begins as zeros and never moves.
        max_norm: Rows are scaled down to this norm when they are used.
        norm_type: Which norm.
        scale_grad_by_freq: Divide a row's gradient by how often the batch has its id.
        sparse: See :class:`TableConfig`.
        servers: What ``ps.connect`` or ``ps.local`` returned, or addresses.
        name: The same name is the same table, for all trainers.
        optimizer: ``ps.SGD``, ``Adagrad``, ``RowwiseAdagrad`` or ``Adam``; it runs on the servers.
        sharding: ``"hash"``, ``"range"`` or ``"table"``.
        init: What rows begin with.
        dtype: Of the rows.
        staleness: How many own pushes the rows of a prefetched batch may lack.
        grad_scale: Gradients are multiplied by this before they are pushed. With n trainers, 1/n
            makes them DDP's mean.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        servers: AnyServers,
        name: str,
        optimizer: Optimizer | None = None,
        sharding: str = "hash",
        init: Init | None = None,
        dtype: torch.dtype | None = None,
        staleness: int = 0,
        grad_scale: float = 1.0,
    ) -> None:
        config = TableConfig(
            name,
            num_embeddings,
            embedding_dim,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            mode="sum",
            sparse=sparse,
            padding_idx=padding_idx,
            optimizer=optimizer or SGD(),
            sharding=sharding,
            init=init or Init(),
            dtype=dtype or torch.get_default_dtype(),
            pooling="trainer",
        )
        super().__init__(config, servers, staleness, grad_scale)

    def forward(self, input: Tensor) -> Tensor:
        """The rows of ids of any shape."""
        name = self.config.name
        return self._tables.forward(input, lambda: {0: flat_ids(name, input)})[0]

    def prefetch(self, input: Tensor) -> None:
        """Announce the input of a later forward, so that its lookup overlaps with other work."""
        self._tables.prefetch(input, {0: flat_ids(self.config.name, input)})


class EmbeddingBag(_OneTable):
    """``nn.EmbeddingBag`` with its table on servers; forward looks up, backward pushes.

    Args:
        num_embeddings: Rows; the arguments up to ``padding_idx`` are those of ``nn.EmbeddingBag``.
        embedding_dim: Values in a row.
        max_norm: Rows are scaled down to this norm when they are used.
        norm_type: Which norm.
        scale_grad_by_freq: Divide a row's gradient by how often the batch has its id.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        sparse: See :class:`TableConfig`.
        include_last_offset: Offsets end with the number of ids.
        padding_idx: A row that begins as zeros, never moves and does not count.
        servers: What ``ps.connect`` or ``ps.local`` returned, or addresses.
        name: The same name is the same table, for all trainers.
        optimizer: ``ps.SGD``, ``Adagrad``, ``RowwiseAdagrad`` or ``Adam``; it runs on the servers.
        sharding: ``"hash"``, ``"range"`` or ``"table"``.
        init: What rows begin with.
        dtype: Of the rows.
        pooling: ``"auto"``, ``"trainer"`` or ``"server"``; see :class:`TableConfig`.
        staleness: How many own pushes the rows of a prefetched batch may lack.
        grad_scale: Gradients are multiplied by this before they are pushed. With n trainers, 1/n
            makes them DDP's mean.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        servers: AnyServers,
        name: str,
        optimizer: Optimizer | None = None,
        sharding: str = "hash",
        init: Init | None = None,
        dtype: torch.dtype | None = None,
        pooling: str = "auto",
        staleness: int = 0,
        grad_scale: float = 1.0,
    ) -> None:
        config = TableConfig(
            name,
            num_embeddings,
            embedding_dim,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            mode=mode,
            sparse=sparse,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
            optimizer=optimizer or SGD(),
            sharding=sharding,
            init=init or Init(),
            dtype=dtype or torch.get_default_dtype(),
            pooling=pooling,
        )
        super().__init__(config, servers, staleness, grad_scale)

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """The pooled rows of each bag."""
        bags = Bags(input, offsets, per_sample_weights)
        return self._tables.forward(bags, lambda: {0: flat_bags(self.config, bags)})[0]

    def prefetch(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> None:
        """Announce the input of a later forward, so that its lookup overlaps with other work."""
        bags = Bags(input, offsets, per_sample_weights)
        self._tables.prefetch(bags, {0: flat_bags(self.config, bags)})
