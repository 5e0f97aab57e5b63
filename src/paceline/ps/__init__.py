"""Parameter servers: embedding tables that live in server processes (docs/parameter-servers.md)."""

from __future__ import annotations

from paceline.ps.local import LocalServers, local
from paceline.ps.optim import SGD, Adagrad, Adam, RowwiseAdagrad

__all__ = ["SGD", "Adagrad", "Adam", "LocalServers", "RowwiseAdagrad", "local"]
