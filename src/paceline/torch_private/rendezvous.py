"""How ``init_process_group`` finds its store: by ``env://``, if the script says nothing else."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl, urlparse

_module: Any = importlib.import_module("torch.distributed.rendezvous")
"""The package has a function of the same name."""

Meeting = tuple[Any, int, int]
"""A store, this rank, and how many ranks there are."""

Handler = Callable[..., Iterator[Meeting]]


def replace_env_handler(make: Callable[[Handler], Handler]) -> None:
    """Let ``env://`` mean what ``make`` makes of torch's handler."""
    handlers: dict[str, Any] = _module._rendezvous_handlers
    handlers["env"] = make(handlers["env"])


def replace_handlers(make: Callable[[Handler], Handler]) -> None:
    """The same for all ways in which ranks of a script find each other."""
    handlers: dict[str, Any] = _module._rendezvous_handlers
    handlers.update({scheme: make(handler) for scheme, handler in handlers.items()})


def query_of(url: str) -> dict[str, str]:
    """The rank and the world that ``init_process_group`` was given, if it was."""
    return dict(parse_qsl(urlparse(url).query))
