"""What all modules with tables on servers have in common. Called by their classes.

Such a module has no parameters: an optimizer, DDP and ``state_dict`` see nothing of its tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from paceline.errors import ConfigurationError, NotPicklableError, TableShapeError
from paceline.ps.client.connection import HasAddresses, Servers, as_servers
from paceline.ps.client.prefetch import PrefetchCounts
from paceline.ps.client.table_config import TableConfig
from paceline.ps.client.table_set import TableSet

AnyServers = Servers | HasAddresses | Sequence[str]
"""Where servers are asked for: a connection, what ``ps.local`` returned, or addresses."""


class ServedModule(nn.Module):
    """A module whose tables live on servers.

    Args:
        configs: The tables.
        servers: Where.
        staleness: How many of this module's pushes the rows of a prefetched batch may lack.
        grad_scale: Gradients are multiplied by this before they are pushed.
    """

    def __init__(
        self,
        configs: Sequence[TableConfig],
        servers: AnyServers,
        staleness: int,
        grad_scale: float,
    ) -> None:
        super().__init__()
        self.servers, self._owns_servers = as_servers(servers)
        try:
            self._tables = TableSet(self.servers, configs, staleness, grad_scale)
        except BaseException:
            self.close()
            raise

    @property
    def prefetch_counts(self) -> PrefetchCounts:
        """How prefetched batches fared."""
        return self._tables.announced.counts

    @property
    def freeze(self) -> bool:
        """True: lookups make no graph, and nothing is pushed."""
        return not self._tables.is_trained

    @freeze.setter
    def freeze(self, value: bool) -> None:
        self._tables.is_trained = not value

    def flush(self) -> None:
        """Wait until every push is acknowledged."""
        self.servers.flush()

    def close(self) -> None:
        """Close the connection, if it was made by this module. The tables stay."""
        if self._owns_servers:
            self.servers.close()

    def get_extra_state(self) -> dict[str, Any]:
        """All that ``state_dict`` has: names and learning rates; ``servers.save`` is for tables."""
        return {
            "tables_are_on_servers": [table.config.name for table in self._tables.attached],
            "lr": list(self._tables.lrs),
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take the learning rates; ``servers.load`` takes the tables."""
        names = [table.config.name for table in self._tables.attached]
        if state.get("tables_are_on_servers") != names:
            raise ConfigurationError(
                f"this state is of tables {state.get('tables_are_on_servers')}, and the module has "
                f"{names}"
            )
        self._tables.lrs[:] = [float(lr) for lr in state["lr"]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotPicklableError(
            f"{type(self).__name__} stands for tables on servers, which a copy of it would share: "
            "build it anew with the same names, or save and load tables by servers.save/load"
        )

    def _index(self, name: str) -> int:
        names = [table.config.name for table in self._tables.attached]
        if name not in names:
            raise ConfigurationError(f"there is no table {name!r}; there are {names}")
        return names.index(name)


def checked_rows(weight: Tensor) -> Tensor:
    """Rows that a table is made from."""
    if weight.dim() != 2:
        raise TableShapeError(
            f"Embeddings parameter is expected to be 2-dimensional, not {weight.dim()}-dimensional"
        )
    return weight.detach()
