"""Parameter servers: embedding tables that live in server processes (docs/parameter-servers.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.on_use import import_on_use
from paceline.ps.launch.local import LocalServers, local
from paceline.ps.protocol.optimizers import SGD, Adagrad, Adam, RowwiseAdagrad

if TYPE_CHECKING:
    from paceline.ps.client.batch import Bags
    from paceline.ps.client.connection import Servers, connect
    from paceline.ps.client.table_config import TableConfig
    from paceline.ps.modules.collection import EmbeddingBagCollection
    from paceline.ps.modules.embedding import Embedding, EmbeddingBag
    from paceline.ps.protocol.table_spec import Init, Start

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Bags",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "Init",
    "LocalServers",
    "RowwiseAdagrad",
    "Servers",
    "Start",
    "TableConfig",
    "connect",
    "local",
]

# The trainer's side needs torch and zmq, which `paceline ps --help` does not.
__getattr__ = import_on_use(
    __name__,
    {
        "Bags": "client.batch",
        "Embedding": "modules.embedding",
        "EmbeddingBag": "modules.embedding",
        "EmbeddingBagCollection": "modules.collection",
        "Init": "protocol.table_spec",
        "Servers": "client.connection",
        "Start": "protocol.table_spec",
        "TableConfig": "client.table_config",
        "connect": "client.connection",
    },
)
