"""Parameter servers: embedding tables that live in server processes (docs/parameter-servers.md)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paceline.ps.local import LocalServers, local
from paceline.ps.optim import SGD, Adagrad, Adam, RowwiseAdagrad

if TYPE_CHECKING:
    from paceline.ps.collection import EmbeddingBagCollection
    from paceline.ps.config import TableConfig
    from paceline.ps.connection import Servers, connect
    from paceline.ps.embedding import Embedding, EmbeddingBag
    from paceline.ps.inputs import Bags
    from paceline.ps.spec import Init, Start

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

# The trainer's side needs torch and zmq, which `paceline ps --help` does not. No name may be that
# of a submodule: importing that would put the module in its place.
_IMPORTED_ON_USE = {
    "Bags": "inputs",
    "Embedding": "embedding",
    "EmbeddingBag": "embedding",
    "EmbeddingBagCollection": "collection",
    "Init": "spec",
    "Servers": "connection",
    "Start": "spec",
    "TableConfig": "config",
    "connect": "connection",
}


def __getattr__(name: str) -> object:
    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"module 'paceline.ps' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"paceline.ps.{_IMPORTED_ON_USE[name]}"), name)
    globals()[name] = value
    return value
