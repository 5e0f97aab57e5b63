"""What a user says about a table: frozen, checked at once. Called by the modules.

``TableConfig`` is what ``nn.EmbeddingBag`` has as arguments, and where the table lives;
``TableSpec`` (``ps/protocol/table_spec.py``) is the part of it that servers know.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from paceline.errors import ConfigurationError
from paceline.ps.protocol.optimizers import SGD, Optimizer
from paceline.ps.protocol.table_spec import Init, Sharding, TableSpec
from paceline.ps.protocol.wire import Dtype

DTYPES: dict[torch.dtype, Dtype] = {getattr(torch, each.name.lower()): each for each in Dtype}
MODES = ("sum", "mean", "max")
POOLINGS = ("auto", "trainer", "server")


@dataclass(frozen=True)
class TableConfig:
    """One table of a collection; most arguments are those of ``nn.EmbeddingBag``.

    Args:
        name: The same name is the same table, for all trainers of these servers.
        num_embeddings: Rows.
        embedding_dim: Values in a row.
        max_norm: Rows are scaled down to this norm when they are used, or None.
        norm_type: Which norm.
        scale_grad_by_freq: Divide a row's gradient by how often the batch has its id.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        sparse: Add up gradients of a row in the way of torch's sparse gradients. It changes the
            last bits with ``mode="mean"`` or weights, and nothing else: only rows of the batch
            are ever pushed.
        include_last_offset: Offsets end with the number of ids.
        padding_idx: A row that begins as zeros, never moves, and does not count.
        optimizer: What a push does.
        sharding: ``"hash"`` or ``"range"`` spread rows over all servers; ``"table"`` puts the
            whole table on one.
        init: What rows begin with.
        dtype: Of the rows.
        pooling: ``"trainer"``: rows travel; ``"server"``: pooled bags travel; ``"auto"``: for each
            batch whatever is (noticeably) fewer bytes, where the bits are the same.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    mode: str = "mean"
    sparse: bool = False
    include_last_offset: bool = False
    padding_idx: int | None = None
    optimizer: Optimizer = dataclasses.field(default_factory=SGD)
    sharding: str = "hash"
    init: Init = dataclasses.field(default_factory=Init)
    dtype: torch.dtype = torch.float32
    pooling: str = "auto"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigurationError(
                f"table {self.name!r}: mode has to be one of sum, mean or max, not {self.mode!r}"
            )
        _check_word(self.name, "sharding", self.sharding, tuple(each.value for each in Sharding))
        _check_word(self.name, "pooling", self.pooling, POOLINGS)
        if self.dtype not in DTYPES:
            raise ConfigurationError(f"table {self.name!r}: rows cannot be {self.dtype}")
        if self.mode == "max" and (self.sparse or self.scale_grad_by_freq):
            what = "sparse weights" if self.sparse else "scaling the gradient by the frequency"
            raise ConfigurationError(f"table {self.name!r}: max mode does not support {what}")
        self.spec()  # checks the rest

    def spec(self) -> TableSpec:
        """What servers are told. The learning rate is not part of it: it travels with pushes."""
        padding = self.padding_idx
        if padding is not None and padding < 0:
            padding += self.num_embeddings
        kind = type(self.optimizer)
        return TableSpec(
            self.name,
            self.num_embeddings,
            self.embedding_dim,
            DTYPES[self.dtype],
            dataclasses.replace(self.optimizer, lr=kind().lr),
            self.init,
            padding,
            self.max_norm,
            self.norm_type,
        )

    def may_pool(self, servers: int) -> bool:
        """Say whether a server can pool this table's bags without changing a bit."""
        is_whole = self.sharding == Sharding.TABLE.value or servers == 1
        is_linear = self.mode != "max" and self.max_norm is None
        return is_whole and is_linear and not (self.scale_grad_by_freq or self.sparse)

    def check_pooling(self, servers: int) -> None:
        """Refuse ``pooling="server"`` where it cannot be had."""
        if self.pooling == "server" and not self.may_pool(servers):
            raise ConfigurationError(
                f'table {self.name!r}: pooling="server" needs the whole table on one server '
                '(sharding="table"), mode "sum" or "mean", and neither max_norm nor '
                "scale_grad_by_freq nor sparse"
            )


def _check_word(table: str, what: str, found: str, known: tuple[str, ...]) -> None:
    if found not in known:
        raise ConfigurationError(f"table {table!r}: {what} is one of {known}, not {found!r}")
